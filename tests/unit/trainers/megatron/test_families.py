"""Every family through megatron-core at every form of parallelism, against transformers: numbers, gradients, weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_models import FAMILIES, LAYOUTS, draw

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]

HERE = Path(__file__).parent
VALUES, GRADIENTS = 1e-5, 1e-4  # relative, of a tensor's norm; float32 gives 1e-6 and less


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        draw(name, root)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_gradients_and_weights_are_those_of_transformers(models, layout):
    world, flags, names = LAYOUTS[layout]
    (models / "rendezvous").unlink(missing_ok=True)
    command = [sys.executable, "families_main.py", str(models), str(world), json.dumps(flags), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(world):
        answers = json.loads((models / f"answers-{rank}.json").read_text())
        assert set(answers) == set(names)
        for name, found in answers.items():
            where = f"{name}, rank {rank}: {found}"
            assert max(found["log_probs"], found["entropy"], found["loss"]) < VALUES, where
            assert 0 < found["gradients"] < GRADIENTS, where
            assert found["gathered"] == [], where
            assert found["copied"] == [] or not flags.get("use_distributed_optimizer", True), where
            if rank == 0:
                assert found["count"] > 20, where
