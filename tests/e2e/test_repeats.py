"""The same recipe and seed twice: identical samples, metrics and final weights, bit for bit."""

import asyncio
import hashlib
import json

import pytest

from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

RECIPE = """
name = "twice"
seed = 5

[rollout]
hf_checkpoint = "model"
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 10
rollout_slots = 6

[data]
prompt_data = "rows.jsonl"
input_key = "q"
label_key = "a"
rollout_shuffle = true

[reward]
custom_rm_path = "length.py:reward"

[cluster]
cpu_threads = 1

[train]
lr = 2e-3

[[stage]]
name = "warmup"
loss_type = "sft_loss"
num_rollout = 2
n_samples_per_prompt = 1

[[stage]]
name = "grpo"
num_rollout = 2
kl_loss_coef = 0.01
num_steps_per_rollout = 2
"""


def _run(slime, work, name, *args):
    done = slime("run", "twice.toml", "--run-dir", name, *args, cwd=work)
    assert done.returncode == 0, done.stderr
    run = work / name
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "samples": asyncio.run(_samples(run)),
        "metrics": [_untimed(line) for line in metrics],
        "weights": hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest(),
    }


async def _samples(run):
    """Every step's samples, in the order in which it trained on them."""
    ledger = SqliteLedger(run)
    try:
        steps = [await ledger.samples(await ledger.composition(version)) for version in range(1, 5)]
    finally:
        await ledger.close()
    assert all(steps)
    return [[sample.to_dict() for sample in step] for step in steps]


def _untimed(value):
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if not k.startswith(("time", "seconds", "at", "perf"))}
    return value


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model")
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "length.py").write_text("def reward(args, sample, **kw):\n    return float(sample.response_length)\n")
    (tmp_path / "twice.toml").write_text(RECIPE)
    return tmp_path


def test_the_same_recipe_and_seed_repeat_bit_for_bit(slime, work):
    first, second = _run(slime, work, "a"), _run(slime, work, "b")
    assert first["samples"] == second["samples"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == second["weights"]


def test_slots_do_not_change_a_run_and_another_seed_does(slime, work):
    first = _run(slime, work, "a")
    slots = _run(slime, work, "b", "--rollout-slots", "3")
    other = _run(slime, work, "c", "--seed", "6")
    assert first["weights"] == slots["weights"]
    assert first["weights"] != other["weights"]
