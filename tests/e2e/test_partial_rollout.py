"""Over-sampling and partial rollout with the embedded engine: continued tokens are those of a response never stopped.

Weights are frozen (lr 0) where two runs are compared sample by sample: a sample that stood still over one or more
steps, whose keys and values were computed again under a new version, must have the same ids and log-probs, bit for bit.
"""

import json
from pathlib import Path

import pytest
from recorded import run_here, steps_of

from slime_core.config.load import load_config
from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

REWARD = '''
def reward(args, sample, **kw):
    """Share of digits, so that groups differ."""
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''
STOPS = ("--rollout-stop-token-ids", "3", "--rollout-stop-token-ids", "7", "--rollout-stop", "+")
OVER = ("--over-sampling-batch-size", "6", "--partial-rollout")
STEPS = 4


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model")
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text(REWARD)
    return tmp_path


def _run(work, name, *flags, steps=STEPS, batch=2):
    """The samples of every step, and the steps' metrics without times."""
    given = [
        *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
        *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", "4"),
        *("--num-rollout", steps, "--rollout-batch-size", batch, "--n-samples-per-prompt", "3"),
        *("--rollout-max-response-len", "40", "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1"),
    ]
    config = load_config(None, [*map(str, given), *STOPS, *flags])
    metrics = run_here(work / name, config)
    return _samples(work / name, steps), metrics


def _samples(run: Path, steps: int):
    found, counts = steps_of(run, steps)
    assert counts["pending"] == 0
    return found


def test_continued_tokens_and_log_probs_are_those_of_a_response_never_stopped(work):
    steps, metrics = _run(work, "partial", *OVER, "--lr", "0")
    (whole,), _ = _run(work, "whole", "--lr", "0", steps=1, batch=6 + 2 * (STEPS - 1))
    plain = {sample.id: sample for sample in whole}
    taken = [sample for step in steps for sample in step]
    mixed = [sample for sample in taken if len(set(sample.weight_versions)) > 1]
    assert mixed, "nothing was ever continued"
    assert sum(m["rollout/continued_samples"] for m in metrics) == len(mixed)
    assert len({sample.response_length for sample in taken}) > 3
    for sample in taken:
        want = plain[sample.id]
        assert sample.tokens == want.tokens
        assert sample.rollout_log_probs == want.rollout_log_probs
        assert (sample.response, sample.status) == (want.response, want.status)


def test_two_runs_that_learn_are_the_same_bit_for_bit_whatever_the_slots(work):
    flags = (*OVER, "--lr", "3e-3", "--mask-offpolicy-in-partial-rollout", "--dynamic-sampling", "equal_rewards")
    one, first = _run(work, "one", *flags)
    two, second = _run(work, "two", *flags, "--rollout-slots", "5")
    assert [[s.to_dict() for s in step] for step in one] == [[s.to_dict() for s in step] for step in two]
    assert first == second
    weights = [(work / name / "final" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    mixed = [s for step in one for s in step if len(set(s.weight_versions)) > 1]
    assert mixed
    for sample in mixed:
        newest = max(sample.weight_versions)
        assert sample.loss_mask == [int(v == newest) for v in sample.weight_versions]


def test_free_over_sampling_loses_nothing(work):
    steps, _ = _run(work, "free", *OVER, "--async-schedule", "free", "--lr", "3e-3")
    assert [len(step) for step in steps] == [6] * STEPS
    for version, step in enumerate(steps):
        assert all(max(sample.weight_versions) <= version for sample in step)
