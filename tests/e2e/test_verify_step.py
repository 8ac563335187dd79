"""`slime run --verify-step N`: a real run's step agrees with its slow recomputation, and is told where it does not."""

import json

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

REWARD = '''
def reward(args, sample, **kw):
    """Share of digits, so that groups differ."""
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''
BROKEN = '''
import slime_core
from slime_core.protocols import Loss


def centred(log_probs, entropy, columns, train):
    """Says that a token's loss is its own, and takes the mean of its block."""
    return -(log_probs - log_probs.mean()) ** 2 * columns["advantages"], {}


@slime_core.hookimpl
def slime_loss():
    return [Loss(name="centred", fn=centred, columns=("advantages",), local=lambda train: True)]
'''


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model", tied=True)
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text(REWARD)
    return tmp_path


def run(slime, work, *more, **kwargs):
    return slime(
        *("run", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--input-key", "q", "--label-key", "a"),
        *("--custom-rm-path", "digits.py:reward", "--num-rollout", "2", "--rollout-batch-size", "3"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "8", "--lr", "1e-3", "--cpu-threads", "1"),
        *("--dtype", "float32", "--max-tokens-per-gpu", "40", "--no-export-final", "--run-dir", "out", *more),
        cwd=work,
        **kwargs,
    )


def answers(work):
    """verify.json, and the metrics of both steps."""
    lines = [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines if line["kind"] == "step"]
    return json.loads((work / "out" / "verify.json").read_text()), metrics


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--num-steps-per-rollout", "2", "--kl-loss-coef", "0.1"), id="one_rank"),
        pytest.param(
            ("--advantage-estimator", "gspo", "--use-tis", "--actor-num-gpus-per-node", "2"),
            id="gspo_on_two_ranks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(("--lora-rank", "4", "--kl-loss-coef", "0.1"), id="adapters"),
    ],
)
def test_a_step_of_a_run_agrees_with_the_slow_way(slime, work, more):
    done = run(slime, work, "--verify-step", "2", *more)
    assert done.returncode == 0, done.stderr
    found, (first, second) = answers(work)
    assert (found["step"], found["ok"], found["recomputed_in"]) == (2, True, "float64")
    assert found["gradient_error"] < 1e-4
    assert found["loss_error"] < 1e-4
    assert found["gradient_error"] == max(found["parameters"].values())
    learning = "lora_B.default" if "--lora-rank" in more else "weight"
    assert f"model.layers.0.mlp.up_proj.{learning}" in found["parameters"]
    assert "verify/ok" not in first
    assert (second["verify/ok"], second["verify/gradient_error"]) == (1, found["gradient_error"])
    assert "step 2 agrees with the plain recomputation in float64" in done.stderr


def test_a_verified_step_is_the_step_it_would_have_been(slime, work):
    steps = []
    for more in ((), ("--verify-step", "1")):
        assert run(slime, work, "--run-dir", f"out{len(steps)}", *more).returncode == 0
        lines = (work / f"out{len(steps)}" / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line)["metrics"] for line in lines]
        steps.append([{k: v for k, v in row.items() if not k.startswith("verify/")} for row in metrics])
    assert steps[0] == steps[1]


def test_a_loss_that_is_not_what_it_says_is_found(slime, work, install_plugin):
    site = install_plugin("centred", BROKEN)
    flags = ("--plugin", "centred", "--loss-type", "centred", "--verify-step", "1", "--logprob-chunk-tokens", "5")
    done = run(slime, work, *flags, path=[site])
    assert done.returncode == 0, done.stderr
    found, metrics = answers(work)
    assert not found["ok"]
    assert found["gradient_error"] > 0.01
    assert metrics[0]["verify/ok"] == 0
    assert "step 1 DIFFERS" in done.stderr


def test_a_step_that_the_run_does_not_have_is_refused(slime, work):
    done = run(slime, work, "--verify-step", "3")
    assert done.returncode == 2, done.stderr
    assert "1 to 2" in done.stderr
    assert not (work / "out").exists()
