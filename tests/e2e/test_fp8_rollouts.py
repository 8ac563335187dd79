"""Whole runs whose engine computes with weights in fp8: what they say of it, and that they learn."""

import json
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from small_task import write_task

from slime_core.testing import tiny_model
from slime_core.testing.models import fp8_model

pytestmark = pytest.mark.system

REWARD = "def reward(args, sample):\n    return sum(c.isdigit() for c in sample.response) / 8\n"
ARGS = (
    *("run", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--input-key", "q", "--label-key", "a"),
    *("--custom-rm-path", "digits.py:reward", "--rollout-max-response-len", "8", "--lr", "5e-3", "--device", "cpu"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--dtype", "float32", "--run-dir", "run"),
)
WEIGHED = "use_tis weighs tokens by their ratio"


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path, REWARD)


def run(forked_slime, folder, *args):
    """The metrics of its steps, its config, and what it said."""
    done = forked_slime(*ARGS, *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row["kind"] == "step"]
    return steps, tomllib.loads((folder / "run" / "config.toml").read_text()), done.stderr


def test_a_run_in_fp8_learns_with_a_correction_on(forked_slime, task):
    steps, config, text = run(forked_slime, task, "--rollout-quantization", "fp8", "--num-rollout", "10")
    assert (config["train"]["use_tis"], config["rollout"]["rollout_quantization"]) == (True, "fp8")
    assert text.count(WEIGHED) == 1
    gaps, rewards = ([step[name] for step in steps] for name in ("train_rollout_logprob_abs_diff", "reward/mean"))
    assert all(1e-4 < gap < 0.1 for gap in gaps)  # without rounding it is 1e-7
    assert all("tis_weight" in step for step in steps)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2


@pytest.mark.nightly
def test_an_engine_beside_the_trainer_gets_rounded_weights_and_final_is_in_floats(forked_slime, task):
    fp8_model(task / "fp8", tiny_model(task / "float", hidden=64))
    args = ("--hf-checkpoint", "fp8", "--max-staleness", "1", "--no-colocate", "--num-rollout", "2", "--no-use-tis")
    steps, config, text = run(forked_slime, task, *args, "--rollout-quantization", "fp8")
    assert config["train"]["use_tis"] is False
    assert "no correction is on: --use-tis" in text
    assert "weights are fp8 in blocks: they train as floats" in text
    assert steps[0]["train_rollout_logprob_abs_diff"] < 1e-3 < steps[1]["train_rollout_logprob_abs_diff"]
    tensors = load_file(task / "run" / "final" / "model.safetensors")
    assert not [name for name, tensor in tensors.items() if "scale" in name or tensor.dtype == torch.float8_e4m3fn]
    assert "quantization_config" not in json.loads((task / "run" / "final" / "config.json").read_text())
