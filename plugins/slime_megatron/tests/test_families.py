"""Every family through megatron-core at every form of parallelism, against transformers: numbers, gradients, weights."""

import json
from pathlib import Path

import pytest
from family_models import FAMILIES, LAYOUTS, draw

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-families")]

MAIN = Path(__file__).with_name("families_main.py")
VALUES, GRADIENTS = 1e-5, 1e-4  # relative, of a tensor's norm; float32 gives 1e-6 and less


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What transformers makes of every family."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        draw(name, root)
    return root


RARE = ("grouped", "tensor, whole experts", "grouped tensor, expert, expert tensor")
"""Layouts whose parts other layouts prove one by one."""

COMPILED = {"one": {"TORCH_COMPILE_DISABLE": "0"}}
"""Where Megatron's own functions are compiled; elsewhere that takes ten times as long as all the rest."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) if name in RARE else name for name in LAYOUTS]
)
def test_log_probs_gradients_and_weights_are_those_of_transformers(models, zygote, tmp_path, layout):
    world, flags, names = LAYOUTS[layout]
    (models / "rendezvous").unlink(missing_ok=True)
    ranks = [[MAIN, models, world, json.dumps(flags), rank, *names] for rank in range(world)]
    zygote.together(tmp_path, ranks, **COMPILED.get(layout, {}))
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
