"""The tool of the learning curves: bands of outcomes, what lies outside them, and runs that fail."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from slime_core.algorithms import algorithms
from slime_core.config.load import read, stages

pytestmark = pytest.mark.unit

TOOL = Path(__file__).parents[1] / "tools" / "bench" / "make_bands.py"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("make_bands", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_bands", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BANDS", tmp_path / "bands.json")
    return module


@pytest.fixture
def outcomes(tool):
    """Three seeds of one algorithm that end at 0.8, 0.9 and 1.0 on level curves."""
    return [
        tool.Outcome(algorithm="grpo", seed=seed, warmup=0.3, accuracy=end, curve=(end,) * tool.BINS, seconds=1.0)
        for seed, end in enumerate((0.8, 0.9, 1.0))
    ]


def test_every_algorithm_that_samples_has_a_curve(tool):
    assert set(tool.ALGORITHMS) == set(algorithms()) - {"sft", "dpo"}


def test_a_curve_is_parted_evenly_and_every_step_counts_once(tool):
    assert tool.parts([float(i) for i in range(30)]) == (2, 7, 12, 17, 22, 27)
    assert sum(tool.parts([1.0] * 7)) == tool.BINS


def test_a_band_is_mean_and_sample_deviation(tool, outcomes):
    made = tool.band(outcomes)
    assert made["accuracy"] == {"mean": 0.9, "sigma": 0.1}
    assert len(made["curve"]) == tool.BINS
    assert made["seeds"]["2"] == {"warmup": 0.3, "accuracy": 1.0}
    assert tool.band(outcomes[:1])["accuracy"]["sigma"] == 0


def test_what_lies_outside_is_named_with_its_band(tool, outcomes):
    made = tool.band(outcomes)
    assert all(tool.outside(one, made) == [] for one in outcomes)
    far = tool.Outcome(algorithm="grpo", seed=0, warmup=0.3, accuracy=0.49, curve=(0.9,) * 5 + (0.4,), seconds=1.0)
    assert tool.outside(far, made) == [
        "held-out accuracy is 0.490, the band is 0.900 +- 4 * 0.100",
        "mean reward in part 6 of 6 is 0.400, the band is 0.900 +- 4 * 0.100",
    ]


def test_a_narrow_band_is_widened_to_the_floor_and_nan_is_always_outside(tool, outcomes):
    made = tool.band(outcomes[:1])
    near = tool.Outcome(algorithm="grpo", seed=0, warmup=0, accuracy=0.879, curve=(0.8,) * tool.BINS, seconds=1.0)
    assert tool.outside(near, made) == []
    lost = tool.Outcome(algorithm="grpo", seed=0, warmup=0, accuracy=float("nan"), curve=near.curve, seconds=1.0)
    assert len(tool.outside(lost, made)) == 1


def test_bands_of_other_algorithms_stay_and_keep_their_order(tool, outcomes):
    tool.store({"rloo": outcomes})
    tool.store({"grpo": outcomes})
    stored = json.loads(tool.BANDS.read_text())
    assert list(stored["algorithms"]) == ["grpo", "rloo"]
    assert tool.stored_bands() == stored


def test_the_table_has_a_row_an_algorithm_and_its_worst_seed(tool, outcomes):
    assert tool.table({"grpo": outcomes}).splitlines()[2:] == [
        "| `grpo` | 0.300 | 0.900 | 0.100 | +0.500 | 0.900 to 0.900 |"
    ]


def test_a_run_that_fails_is_named_and_the_others_go_on(tool, outcomes, tmp_path):
    def learn(folder, algorithm, seed):
        if (algorithm, seed) == ("grpo", 1):
            raise tool.Failed("grpo-1 ended with exit code 6")
        return outcomes[seed] if seed != 2 or algorithm == "grpo" else still

    still = tool.Outcome(algorithm="rloo", seed=2, warmup=0.3, accuracy=0.35, curve=(0.3,) * 6, seconds=1.0)
    outcomes[:2] = [tool.Outcome("rloo", s, 0.3, 0.9, (0.9,) * 6, 1.0) for s in (0, 1)]
    found, wrong = tool.run_all(tmp_path, ["grpo", "rloo"], range(3), 2, warm=lambda folder, seed: folder, learn=learn)
    assert "grpo" not in found, "its band would be of two seeds"
    assert any(text.startswith("grpo, seed 1: grpo-1 ended") for text in wrong)
    assert any("rloo, seed 2 gained +0.050" in text for text in wrong)


@pytest.mark.parametrize("name", sorted(set(algorithms()) - {"sft", "dpo"}))
def test_the_settings_of_a_run_hold_together(tool, tmp_path, name):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tool.COMMON)
    flags = [flag.format(teacher="hub/teacher") for flag in tool.ALGORITHMS[name]]
    loaded = read(recipe, ["--hf-checkpoint", "hub/start", "--advantage-estimator", name, *tool.LEARN, *flags])
    (stage,) = stages(loaded.config)
    assert loaded.notices == ()
    assert stage.train.num_steps_per_rollout == 2, "so that old and new log-probs differ"
    read(recipe, tool.WARMUP)
    read(recipe, [*tool.TEACHER, "--hf-checkpoint", "hub/start"])
