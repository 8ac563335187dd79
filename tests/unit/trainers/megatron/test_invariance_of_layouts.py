"""No layout and no cut into micro-batches changes a step's loss or gradient: each is that of the slow way in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from invariance_main import SIZES
from splits import SETTINGS

from slime_core.testing import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-invariance")]

HERE = Path(__file__).parent
LAYOUTS = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cut_on_two_ranks_agrees_with_the_slow_way(folder, tmp_path, layout):
    out = tmp_path / "answer.json"
    command = [sys.executable, "invariance_main.py", str(folder), str(out), "2", json.dumps(LAYOUTS[layout])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert len(found) == len(SETTINGS) * len(SIZES)
    for case in SETTINGS:
        counts = [found[f"{case}-{size}"]["micro_batches"] for size in SIZES]
        assert counts[0] > counts[2] >= 1, counts
        for size in SIZES:
            one = found[f"{case}-{size}"]
            assert one["float64"] == 1
            assert max(one["gradient_error"], one["loss_error"]) < 1e-5, (case, size, one)
