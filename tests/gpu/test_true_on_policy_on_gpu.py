"""Exactly on-policy: in bfloat16 the trainer's log-probs are the engine's, bit for bit, and runs repeat."""

import hashlib
import json

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.gpu

STEPS = 4
REWARD = "def reward(args, sample, **kw):\n    return len(set(sample.response)) / 10 + len(sample.prompt) % 3\n"
ROWS = [{"q": f"{a} + {b} * {a} =", "a": str(a + b * a)} for a in range(5) for b in range(10, 13)]


def _run(slime, folder, name, family, *flags):
    """How far log-probs are apart in each step, gradient norms, and the checksum of the final weights."""
    model = folder / family
    if not model.exists():
        tiny_model(model, family=family, hidden=128, layers=3)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (folder / "judge.py").write_text(REWARD)
    done = slime(
        *("run", "--hf-checkpoint", model, "--prompt-data", folder / "rows.jsonl", "--input-key", "q"),
        *("--label-key", "a", "--custom-rm-path", f"{folder / 'judge.py'}:reward", "--device", "cuda"),
        *("--dtype", "bfloat16", "--rollout-batch-size", 8, "--n-samples-per-prompt", 8, "--num-rollout", STEPS),
        *("--rollout-max-response-len", 70, "--lr", "1e-3", "--run-dir", name, "--true-on-policy-mode", *flags),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    weights = (folder / name / "final" / "model.safetensors").read_bytes()
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    apart, norms = ([step[name] for step in steps] for name in ("train_rollout_logprob_abs_diff", "grad_norm"))
    return apart, norms, hashlib.sha256(weights).hexdigest()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probs_agree_and_runs_repeat_bit_for_bit(family, slime, tmp_path):
    one = _run(slime, tmp_path, "one", family)
    assert one[0] == [0.0] * STEPS
    assert _run(slime, tmp_path, "two", family) == one


def test_with_temperature_and_recomputed_layers(slime, tmp_path):
    flags = "--rollout-temperature", "0.8", "--gradient-checkpointing"
    assert _run(slime, tmp_path, "run", "qwen2", *flags)[0] == [0.0] * STEPS
