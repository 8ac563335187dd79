"""The recipe learns its task from random weights, by reward alone."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
RECIPE = Path(__file__).parent / "recipe.toml"


def test_a_model_made_from_a_seed_learns_a_task_of_reasoning_gym(cli):
    done = cli("run", RECIPE, "--run-dir", "run", "--cpu-threads", "1")
    assert done.code == 0, done.err
    first, last = (
        json.loads(Path(f"run/evaluations/letter_counting-{step:06d}.json").read_text())["figures"] for step in (0, 20)
    )
    assert first["reward/mean"] < 0.2
    assert last["reward/mean"] > 0.35
