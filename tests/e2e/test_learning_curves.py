"""Every algorithm learns to carry from the same warmed-up model, as well as the stored bands say, seed by seed.

Settings, bands and figures are those of tools/bench/make_bands.py, which also writes the bands: a change that is meant to move
them runs `python tools/bench/make_bands.py --jobs 2` and says so. A run takes about 20 seconds on one core; warm-ups and the
teacher are made once and shared, also between the workers of pytest-xdist.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "make_bands.py"


def _load():
    spec = importlib.util.spec_from_file_location("make_bands", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_bands"] = module
    spec.loader.exec_module(module)
    return module


bands = _load()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where models and runs lie; the same for every worker."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "learning"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.mark.timeout(1200)  # the first test of a seed makes its warm-up, and may wait for another worker's
@pytest.mark.parametrize("seed", range(bands.SEEDS))
@pytest.mark.parametrize("algorithm", bands.ALGORITHMS)
def test_an_algorithm_learns_and_ends_within_its_band(folder, algorithm, seed):
    stored = bands.stored_bands()["algorithms"]
    assert algorithm in stored, f"there is no band: python tools/bench/make_bands.py --only {algorithm}"
    one = bands.learn(folder, algorithm, seed)
    assert bands.learnt(one), f"held-out accuracy went from {one.warmup:.3f} to {one.accuracy:.3f}"
    assert bands.outside(one, stored[algorithm]) == []
