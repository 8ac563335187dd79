"""The differential oracle: one batch under our losses and those of TRL (its own code), slime, verl and OpenRLHF."""

import dataclasses
import io
import json
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.unit

TOOLS = Path(__file__).parents[3] / "tools" / "bench"
WITHIN = 1e-6
FORMULAS = ("slime", "verl", "openrlhf")


@pytest.fixture(scope="module")
def found():
    """What the tool prints for the batch of seed 0."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        with imported(patch) as tool:
            patch.setattr(sys, "argv", ["compare_losses.py", "--json"])
            code = tool.main()
    return json.loads(out.getvalue()) | {"code": code}


@contextmanager
def imported(patch):
    """The tool as a module, and none of it afterwards."""
    patch.syspath_prepend(str(TOOLS))
    import compare_losses

    yield compare_losses
    for name in ("compare_losses", "comparisons", "published_losses"):
        sys.modules.pop(name, None)


@pytest.fixture
def tool(monkeypatch):
    with imported(monkeypatch) as module:
        yield module


def judge(rows):
    """Terms that must agree do, within 1e-6; terms with a reason to differ do differ."""
    assert [r for r in rows if r["expected"] == "agree" and not r["difference"] <= WITHIN] == []
    assert [r for r in rows if r["expected"] == "differ" and not (r["difference"] > WITHIN and r["why"])] == []


@pytest.mark.parametrize("framework", FORMULAS)
def test_every_term_agrees_with_the_published_formula_or_differs_for_a_named_reason(found, framework):
    rows = [r for r in found["rows"] if r["framework"] == framework]
    judge(rows)
    assert {"aggregation", "ratio", "clip", "kl", "total", "gradient"} <= {r["term"] for r in rows if r["agree"]}
    assert any(r["expected"] == "differ" for r in rows)
    assert found["code"] == 0


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "gspo"])
def test_every_term_agrees_with_trls_own_code_or_differs_for_a_named_reason(found, kind):
    assert not found["missing"], f"agreement with TRL's code was not proven: {found['missing'][0]}"
    rows = [r for r in found["rows"] if r["framework"] == "trl" and r["variant"].split()[0].rstrip(",") == kind]
    judge(rows)
    assert {"aggregation", "ratio", "clip", "total", "gradient"} <= {r["term"] for r in rows if r["agree"]}


def test_a_missing_trl_is_said_and_the_other_frameworks_are_compared(tool, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", None)
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", "--framework", "trl", "--framework", "verl"])
    assert tool.main() == 0
    said = capsys.readouterr().out
    assert "trl: not compared, because it cannot be imported" in said
    assert "verl      seq-mean-token-mean" in said


def test_a_loss_that_is_wrong_by_a_thousandth_fails_the_tool(tool, monkeypatch, capsys):
    right = tool.POLICY.fn

    def wrong(log_probs, entropy, columns, train):
        value, metrics = right(log_probs, entropy, columns, train)
        return value * 1.001, metrics

    monkeypatch.setattr(tool, "POLICY", dataclasses.replace(tool.POLICY, fn=wrong))
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", "--framework", "slime"])
    assert tool.main() == 1
    assert "NOT EXPECTED" in capsys.readouterr().out


def test_a_saved_batch_is_read_back_as_it_was(tool, tmp_path):
    batch = tool.generated(3)
    tool.save(batch, tmp_path / "batch.json")
    back = tool.load(tmp_path / "batch.json")
    assert all(torch.equal(getattr(batch, name), getattr(back, name)) for name in tool.FIELDS)


def test_the_recorded_batch_reaches_every_bound(tool):
    # otherwise agreement would say little: clips on both sides, the dual clip, the bound of low_var_kl, masked tokens
    x = tool.generated(0)
    ratio, kept = (x.new - x.old).exp(), x.mask > 0
    assert (kept & (x.advantages > 0) & (ratio > 1.2)).any()
    assert (kept & (x.advantages < 0) & (ratio < 0.8)).any()
    assert (kept & (x.advantages < 0) & (ratio > 3)).any()
    assert (kept & (x.ref - x.new > 3)).any()
    assert (x.valid & ~kept).any()
    assert (kept & ((x.old - x.engine).exp() > 1.15)).any()
