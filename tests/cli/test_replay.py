"""`slime replay`: recorded steps made again from the ledger, bit for bit, without touching the run."""

import json
import shutil
import sqlite3
import sys
import tempfile

import pytest

from slime_core.report import RunDir
from slime_core.report.history import steps_of

pytestmark = pytest.mark.system

ROW_KEYS = {
    "id",
    "reward",
    "tokens",
    "advantage",
    "advantage_min",
    "advantage_max",
    "log_prob_diff",
    "log_prob_diff_max",
}
MOVING = '''
"""Advantages against a mean reward that moves from step to step: state that a checkpoint keeps."""
import numpy as np

import slime_core
from slime_core import Estimator


class Mean:
    def __init__(self):
        self.value = 0.0

    def state(self):
        return {"value": self.value}

    def load(self, state):
        self.value = state["value"]


mean = Mean()


def moving(batch, train):
    mean.value = 0.5 * mean.value + 0.5 * float(batch.reward.mean())
    return {"advantages": (batch.reward - mean.value)[batch.sample_of_token()].astype(np.float32)}


@slime_core.hookimpl
def slime_advantage():
    return [Estimator(name="moving", fn=moving)]


@slime_core.hookimpl
def slime_state():
    return mean
'''


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.fixture
def copied(small, tmp_path):
    """A copy of the small run, which a test may change."""
    shutil.copytree(small.run, tmp_path / "copy")
    return tmp_path / "copy"


def answer(cli, *args):
    done = cli("replay", *args, "--json")
    return done.code, json.loads(done.out)


@pytest.mark.parametrize(
    ("step", "began"), [(1, 0), (2, 0), (4, 2)], ids=["warmup", "over_a_stage", "from_a_checkpoint"]
)
def test_a_recorded_step_is_made_again_bit_for_bit(small, cli, step, began):
    code, facts = answer(cli, small.run, "--step", step)
    assert (code, facts["identical"], facts["metrics"], facts["parted"]) == (0, True, {}, [])
    assert facts["began"] == began
    assert facts["origin"].endswith("step-2" if began else "the starting weights")
    recorded = {row["version"]: row["metrics"] for row in steps_of(RunDir.open(small.run))}[step]
    assert {"loss", "grad_norm", "reward/mean", "advantages/abs_mean"} <= recorded.keys()
    assert facts["compared"] >= 30
    first, again = facts["fingerprint"]
    assert first == again != ""
    assert facts["machine"] == {}


def test_every_sample_is_told_with_its_advantage_and_the_worst_tokens(small, cli):
    code, facts = answer(cli, small.run, "--step", 3)
    assert code == 0
    rows = facts["samples"]
    assert len(rows) == 8
    assert set(rows[0]) == ROW_KEYS
    by_group = {}
    for row in rows:
        by_group.setdefault(row["id"].rpartition("-")[0], []).append(row)
        assert row["advantage_min"] <= row["advantage"] <= row["advantage_max"]
        assert 0 <= row["log_prob_diff"] <= row["log_prob_diff_max"] < 1e-5  # embedded engine and trainer, float32
    for group in by_group.values():
        best = max(group, key=lambda row: row["reward"])
        assert best["advantage"] == max(row["advantage"] for row in group)
    gaps = [abs(token["trainer"] - token["rollout"]) for token in facts["worst"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(max(row["log_prob_diff_max"] for row in rows), rel=1e-6)


def test_people_read_one_sentence_and_tables(small, cli):
    done = cli("replay", small.run, "--step", "4")
    assert done.code == 0
    assert done.out.splitlines()[0].startswith("step 4 (grpo) is identical: ")
    for part in ("made from", "checkpoints/step-2, by 2 steps", "as recorded", "grpo/4-0", "differ most"):
        assert part in done.out
    assert done.err.splitlines()[-2:] == ["step 3: done", "step 4: done"]


def test_nothing_of_a_run_that_is_going_on_is_changed_and_nothing_is_left(copied, cli, tmp_path, monkeypatch):
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    with RunDir.reopen(copied):  # somebody holds it
        state = tree(copied)
        assert cli("replay", copied, "--step", "3").code == 0
        assert tree(copied) == state
    assert list(own.iterdir()) == []


def test_verify_recomputes_the_gradient_too(small, cli):
    code, facts = answer(cli, small.run, "--step", 3, "--verify")
    assert (code, facts["verify_ok"]) == (0, True)
    assert facts["verified"]["gradient_error"] < 1e-4
    assert "verify" in cli("replay", small.run, "--step", "3", "--verify").out


def test_a_recorded_loss_that_differs_is_reported(copied, cli):
    path = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "step" and row["version"] == 3]
    was = row["metrics"]["loss"]
    row["metrics"]["loss"] = was * (1 + 1e-7)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, facts = answer(cli, copied, "--step", 3)
    assert (code, facts["identical"]) == (1, False)
    assert facts["metrics"] == {"loss": [row["metrics"]["loss"], was]}
    assert cli("replay", copied, "--step", "3").out.startswith(
        "step 3 (grpo) DIFFERS from what was recorded: 1 metrics"
    )


def test_other_weights_on_the_way_are_told(copied, cli):
    with sqlite3.connect(copied / "ledger.sqlite") as database:
        database.execute("UPDATE steps SET fingerprint = ? WHERE version = 1", ("0" * 32,))
    database.close()
    code, facts = answer(cli, copied, "--step", 2)
    assert (code, facts["parted"], facts["metrics"]) == (1, [1], {})
    assert "already step 1 made other weights" in cli("replay", copied, "--step", "2").out


def test_a_damaged_checkpoint_is_left_out_and_left_where_it_is(copied, cli):
    path = copied / "checkpoints" / "step-2" / "state.json"
    path.write_bytes(path.read_bytes()[:-5])
    done = cli("replay", copied, "--step", "3", "--json")
    assert (done.code, json.loads(done.out)["began"]) == (0, 0)
    assert "checkpoint step-2 is left out" in done.err
    assert path.exists()


@pytest.mark.parametrize(("step", "why"), [(5, "it trained steps 1 to 4"), (99, "it trained steps 1 to 4")])
def test_a_step_that_was_not_trained_is_refused(small, cli, step, why):
    done = cli("replay", small.run, "--step", step)
    assert done.code == 2
    assert why in done.err


def test_pruned_samples_are_named(copied, cli):
    with sqlite3.connect(copied / "ledger.sqlite") as database:
        database.execute(
            "UPDATE samples SET segment = NULL WHERE serial IN (SELECT serial FROM members WHERE version = 1)"
        )
    database.close()
    done = cli("replay", copied, "--step", "2")
    assert done.code == 7
    assert "the samples of step 1 no longer have their payload" in done.err
    assert cli("replay", copied, "--step", "3").code == 0  # from the checkpoint after it


def test_a_recording_of_another_machine_is_reported(copied, cli):
    info = json.loads((copied / "run.json").read_text())
    info["machine"] = {**info["machine"], "cpu_threads": 64, "torch": "1.0"}
    (copied / "run.json").write_text(json.dumps(info))
    _, facts = answer(cli, copied, "--step", 1)  # from the start: no checkpoint says it
    assert facts["machine"]["cpu_threads"] == [64, 1]
    assert facts["machine"]["torch"][0] == "1.0"


def test_a_plugins_state_is_that_of_the_checkpoint(small, tmp_path, cli, install_plugin):
    install_plugin("moving", MOVING)
    run = tmp_path / "run"
    flags = ("--plugin", "moving", "stage.grpo.advantage_estimator=moving", "stage.grpo.kl_loss_coef=0.0")
    assert cli("run", small.folder / "small.toml", *flags, "--run-dir", run).code == 0
    module = sys.modules["moving_plugin_module"]
    for step, value in ((2, 0.0), (3, 99.0)):  # as in a new process; what the checkpoint's state replaces
        module.mean.value = value
        code, facts = answer(cli, run, "--step", step)
        assert (code, facts["identical"]) == (0, True), facts["metrics"]


@pytest.mark.nightly
def test_a_step_of_two_ranks_is_made_again_by_two_ranks(small, tmp_path, cli):
    run = tmp_path / "run"
    assert cli("run", small.folder / "small.toml", "--actor-num-gpus-per-node", "2", "--run-dir", run).code == 0
    code, facts = answer(cli, run, "--step", 4)
    assert (code, facts["identical"], facts["began"]) == (0, True, 2), facts["metrics"]
