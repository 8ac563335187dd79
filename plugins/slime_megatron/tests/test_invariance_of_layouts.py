"""No layout and no cut into micro-batches changes a step's loss or gradient: each is that of the slow way in float64."""

import json
from pathlib import Path

import pytest
from family_models import GROUPED, TENSOR, mixture
from invariance_main import SIZES
from splits import SETTINGS

from slime_core.testing import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-invariance")]

MAIN = Path(__file__).with_name("invariance_main.py")
CASES = {"dense": tuple(SETTINGS), "experts": ("clip",)}
LAYOUTS = {  # model, flags
    "data": ("dense", {}),
    "tensor": ("dense", TENSOR),
    "pipeline": ("dense", {"pipeline_model_parallel_size": 2}),
    "context": ("dense", {"context_parallel_size": 2}),
    "experts": ("experts", {"expert_model_parallel_size": 2}),
    "experts, grouped": ("experts", GROUPED | {"expert_model_parallel_size": 2}),
    "halves of experts, grouped": ("experts", GROUPED | {"expert_tensor_parallel_size": 2}),
    "tensor and experts, grouped": (
        "experts",
        GROUPED | TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}
RARE = ("data", "experts", "experts, grouped", "halves of experts, grouped")
"""Layouts whose parts other layouts prove one by one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    tiny_model(root / "dense", tied=True)
    mixture(root / "experts")
    return root


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) if name in RARE else name for name in LAYOUTS]
)
def test_every_cut_on_two_ranks_agrees_with_the_slow_way(models, zygote, tmp_path, layout):
    out, (model, flags) = tmp_path / "answer.json", LAYOUTS[layout]
    ranks = [[MAIN, rank, models / model, out, 2, json.dumps(flags), *CASES[model]] for rank in range(2)]
    zygote.together(tmp_path, ranks)
    found = json.loads(out.read_text())
    assert len(found) == len(CASES[model]) * len(SIZES)
    for case in CASES[model]:
        counts = [found[f"{case}-{size}"]["micro_batches"] for size in SIZES]
        assert counts[0] > counts[2] >= 1, counts
        for size in SIZES:
            one = found[f"{case}-{size}"]
            assert one["float64"] == 1
            assert max(one["gradient_error"], one["loss_error"]) < 1e-5, (case, size, one)
