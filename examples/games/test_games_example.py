"""The recipe: a model that has never seen anything learns a game from playing it."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.nightly]

BEFORE, LEARNT = 0.1, 0.8  # mean reward of the first step at most, of the last three at least


def test_a_model_learns_to_guess_from_the_hints(train):
    run = train(Path(__file__).with_name("recipe.toml"), "--save-interval", "0")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["metrics"]["reward/mean"] for row in rows if row["kind"] == "step"]
    assert rewards[0] <= BEFORE
    assert min(rewards[-3:]) >= LEARNT
