"""State and activations in host memory: on GPUs the bits of a run without them, with one rank and with two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime_core.testing import tiny_model

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
RANK = Path(__file__).parents[1] / "unit" / "trainers" / "test_cpu_offload.py"


@pytest.mark.parametrize("world", [1, 2])
def test_offload_changes_no_bit_and_checkpoints_resume_in_the_other_place(tmp_path, world):
    if DEVICE == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"not proven: needs {world} GPUs")
    folder = tiny_model(tmp_path / "model", hidden=128, tied=True)
    commands = [[sys.executable, str(RANK), *map(str, (folder, tmp_path, rank, world))] for rank in range(world)]
    ranks = [subprocess.Popen(one, env={**os.environ, "SLIME_GPU_TESTS_DEVICE": DEVICE}) for one in commands]
    assert [rank.wait(300) for rank in ranks] == [0] * world
    sums = json.loads((tmp_path / "sums-0.json").read_text())
    for dtype in ("float32", "bfloat16"):
        assert sums[f"{dtype}-host"] == sums[f"{dtype}-device"]
        for place in ("host", "device"):
            assert sums[f"{dtype}-{place}-resumed"] == sums[f"{dtype}-{place}"][1:]
