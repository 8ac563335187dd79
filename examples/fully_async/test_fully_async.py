"""A run of the recipe, nightly: responses go on over updates, none trains too late, none is lost; it learns."""

import json
from pathlib import Path

import pytest
from recorded import steps_of

pytestmark = [pytest.mark.system, pytest.mark.nightly]

RECIPE = Path(__file__).with_name("recipe.toml")
HELDOUT = "arithmetic_heldout"
IMITATED, LEARNT = 0.5, 0.75  # held-out reward: at most after the warm-up, at least at the end
LENGTHS = {
    "short": (10, 6, 3),
    "whole": (400, 22, 11),
}  # steps of the warm-up and of GRPO, and of these to an evaluation
GROUPS = {"short": 8, "whole": 32}  # of a step
BOUND = 2  # versions


@pytest.fixture(scope="module")
def lengths(length):
    return LENGTHS[length]


@pytest.fixture(scope="module")
def run(train, length, lengths):
    keys = ("warmup.num_rollout", "grpo.num_rollout", "grpo.eval_interval", "grpo.rollout_batch_size")
    stages = zip(keys, (*lengths, GROUPS[length]), strict=True)
    small = ["plugin.rm_math.heldout_rows=200"]
    if length == "short":  # generation is the slower half, on a fast machine too
        small = ["plugin.rm_math.heldout_rows=20", "rollout.rollout_slots=1"]
    return train(RECIPE, *(f"stage.{key}={value}" for key, value in stages), *small)


@pytest.fixture(scope="module")
def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"] for row in rows if row["kind"] == "step" and row["stage"] == "grpo"]


@pytest.mark.parametrize("length", ["whole"], indirect=True)
def test_the_recipe_learns(run, scores):
    found = scores(run, HELDOUT)
    assert found[0] <= IMITATED
    assert found[-1] >= LEARNT


def test_every_group_trains_within_the_bound_and_generation_was_ahead(metrics, length, lengths):
    assert len(metrics) == lengths[1]
    assert [one["staleness/max"] for one in metrics if one["staleness/max"] > BOUND] == []
    oldest = max(one["staleness/max"] for one in metrics)
    assert oldest == BOUND if length == "whole" else oldest > 0
    assert all(one["tis_weight"] != 1 for one in metrics if one["staleness/min"] > 0), "older tokens are not weighed"


def test_responses_go_on_over_updates_and_each_token_says_whose_it_is(run, length, lengths):
    warmup, count, _ = lengths
    steps, counts = steps_of(run, warmup + count)
    assert counts["pending"] == 0
    assert {name for name in counts if name.startswith("dropped/")} == set()
    samples = [sample for step in steps[warmup:] for sample in step]
    assert len(samples) == count * GROUPS[length] * 8
    spanning = [sample for sample in samples if len(set(sample.weight_versions)) > 1]
    assert spanning, "no response met an update"
    assert all(list(sample.weight_versions) == sorted(sample.weight_versions) for sample in samples)
    assert all(len(sample.rollout_log_probs) == sample.response_length for sample in spanning)


def test_every_evaluation_that_was_due_is_there(run, lengths, scores):
    _, count, every = lengths
    assert len(scores(run, HELDOUT)) == 1 + count // every
