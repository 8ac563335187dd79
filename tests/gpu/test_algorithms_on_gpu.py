"""Every algorithm runs on a GPU as it does on a CPU: two steps by flags, the second verified against the slow way."""

import json

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.gpu

CASES = {
    "grpo": ["--use-tis", "--kl-loss-coef", "0.05", "--entropy-coef", "0.01"],
    "dr_grpo": [],
    "gspo": ["--num-steps-per-rollout", "2"],
    "cispo": ["--num-steps-per-rollout", "2"],
    "rloo": ["--use-rs", "--eps-clip-c", "3"],
    "reinforce_plus_plus": ["--kl-coef", "0.05"],
    "reinforce_plus_plus_baseline": [],
    "ppo": ["--critic-lr", "1e-2"],
    "pass_at_k": ["--pass-k", "2"],
    "on_policy_distillation": ["--teacher-load", "teacher"],
}


@pytest.fixture
def run(slime, tmp_path):
    """Two steps by flags in a process of its own; answers the lines of its metrics."""
    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "teacher", seed=1)
    rows = "".join(f'{{"q": "{a}+{b}=", "a": "{a + b}"}}\n' for a in range(3) for b in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "digits.py").write_text(
        "def reward(args, sample, **kw):\n    return sum(char.isdigit() for char in sample.response) / 3\n"
    )

    def start(*flags):
        done = slime(
            *("run", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", "digits.py:reward", "--num-rollout", "2"),
            *("--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "9"),
            *("--lr", "1e-3", "--device", "cuda", "--max-tokens-per-gpu", "60", "--run-dir", "out", *flags),
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        return [row["metrics"] for row in map(json.loads, lines) if row["kind"] == "step"]

    return start


@pytest.mark.parametrize("name", CASES)
def test_a_step_agrees_with_the_slow_way(name, run):
    steps = run("--advantage-estimator", name, "--dtype", "float32", "--verify-step", "2", *CASES[name])
    assert len(steps) == 2
    assert steps[1]["verify/ok"] == 1.0, steps[1]
    assert steps[1]["grad_norm"] > 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "on_policy_distillation"])
def test_bfloat16_trains_too(name, run):
    steps = run("--advantage-estimator", name, "--dtype", "bfloat16", "--verify-step", "2", *CASES[name])
    assert steps[1]["verify/ok"] == 1.0, steps[1]
