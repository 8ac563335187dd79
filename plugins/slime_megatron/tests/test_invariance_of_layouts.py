"""No layout and no cut into micro-batches changes a step's loss or gradient: each is that of the slow way in float64."""

import pytest
from megatron_ranks import PIPELINE, TENSOR, answer, config_of, make_worker, mixture, run_ranks
from splits import SETTINGS, rank_batch_of, with_roles
from trainer_bench import batch_of

from slime_core.testing import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("megatron-invariance")]

SIZES = (17, 40, 10_000)
CASES = {"dense": tuple(SETTINGS), "experts": ("clip",), "deep": ("clip",)}


def sizes_of(case, model):
    """Tokens of a case's micro-batches: all sizes of one case of the dense model."""
    return SIZES[:1] if case != "clip" else SIZES if model == "dense" else SIZES[::2]


GROUPED = {"moe_grouped_gemm": True}
INTERLEAVED = {
    "pipeline_model_parallel_size": 4,
    "num_virtual_stages_per_pipeline_rank": 2,
    "microbatch_group_size_per_virtual_pipeline_stage": 5,
}
LAYOUTS = {  # model, flags
    "data": ("dense", {}),
    "tensor": ("dense", TENSOR),
    "pipeline": ("dense", PIPELINE),
    "pipeline, interleaved": ("deep", INTERLEAVED),
    "context": ("dense", {"context_parallel_size": 2}),
    "experts": ("experts", {"expert_model_parallel_size": 2}),
    "experts, grouped": ("experts", GROUPED | {"expert_model_parallel_size": 2}),
    "halves of experts, grouped": ("experts", GROUPED | {"expert_tensor_parallel_size": 2}),
    "tensor and experts, grouped": (
        "experts",
        GROUPED | TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}
ADAPTERS = {  # of layouts, whose errors are those of an adapter's gradient
    "data, adapter": ("dense", {}),
    "context, adapter": ("dense", {"context_parallel_size": 2}),
    "halves of experts, grouped, adapter": ("experts", GROUPED | {"expert_tensor_parallel_size": 2}),
}
LAYOUTS |= ADAPTERS
RARE = ("data, adapter", "data", "pipeline", "context", "experts", "experts, grouped", "halves of experts, grouped")
"""Layouts whose parts other layouts prove one by one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model, one of more layers, and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    tiny_model(root / "dense", tied=True)
    tiny_model(root / "deep", layers=8)
    mixture(root / "experts")
    return root


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) if name in RARE else name for name in LAYOUTS]
)
def test_every_cut_on_two_ranks_or_four_agrees_with_the_slow_way(models, zygote, tmp_path, layout):
    model, flags = LAYOUTS[layout]
    world = 4 if model == "deep" else 2
    train = {"lora_rank": 4, "lr": 1e-2} if layout in ADAPTERS else {}
    cases = ("clip",) if train else CASES[model]
    cuts = [(case, size) for case in cases for size in sizes_of(case, model)]
    found, *_ = run_ranks(zygote, tmp_path, verified, world, tmp_path, world, str(models / model), flags, cuts, train)
    assert len(found) == len(cuts)
    counts = [found[f"clip-{size}"]["micro_batches"] for size in sizes_of("clip", model)]
    assert counts[0] > counts[-1] >= 1, counts
    for cut, one in found.items():
        assert one["float64"] == 1
        assert max(one["gradient_error"], one["loss_error"]) < 1e-5, (cut, one)


def verified(rank, root, world, model, flags, cuts, train):
    """Errors against the slow way in float64, by setting and size of micro-batches; of an adapter after a step."""
    worker, found = make_worker(config_of(model, flags, **train), rank, world, root / "meeting"), {}
    for case, size in cuts:
        worker.begin(config_of(model, flags, **{**train, **SETTINGS[case], "max_tokens_per_gpu": size}))
        batch = with_roles(batch_of(groups=2, rollouts=3))
        if train:
            worker.step(batch)
        errors = worker.verify(batch)
        found[f"{case}-{size}"] = {
            "micro_batches": len(worker.packs(rank_batch_of(worker, batch))[0]),
            **{name: errors[name] for name in ("float64", "gradient_error", "loss_error")},
        }
    return found


if __name__ == "__main__":
    answer(verified)
