"""Megatron on GPUs: every family's numbers against transformers', on one and on two, in float32 and bfloat16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parents[1] / "unit" / "trainers" / "megatron"
sys.path.append(str(HERE))

from family_models import FAMILIES, LAYOUTS, draw  # noqa: E402

pytestmark = pytest.mark.gpu

LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.3)}  # of log-probs and of gradients, by a tensor's norm


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family, on the CPU in float32."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        draw(name, root)
    return root


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_transformers(models, layout, dtype):
    world, flags, names = LAYOUTS[layout]
    if torch.cuda.device_count() < world:
        pytest.skip(f"not proven: {world} GPUs are needed for the layout {layout}")
    (models / "rendezvous").unlink(missing_ok=True)
    command = [sys.executable, "families_main.py", str(models), str(world), json.dumps(flags), *names]
    environment = {**os.environ, "DEVICE": "cuda", "DTYPE": dtype, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    values, gradients = LIMITS[dtype]
    wrong = []  # of all families: a run on GPUs tells everything at once
    for rank in range(world):
        for name, found in json.loads((models / f"answers-{rank}.json").read_text()).items():
            print(layout, dtype, name, found)
            near = max(found["log_probs"], found["entropy"]) < values and found["gradients"] < gradients
            wrong += [] if near and found["gathered"] == [] else [(rank, name, found)]
    assert wrong == []
