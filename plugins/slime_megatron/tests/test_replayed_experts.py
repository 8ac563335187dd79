"""Routing replay with Megatron at every form of parallelism: gradients are those of FSDP, which one process computes.

Experts are drawn, so that routers would choose most of them otherwise; a dense layer comes first.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, run_ranks
from safetensors.torch import load_file, save_file

from slime_core.testing.families import family_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = {
    "data": {},
    "tensor, layers made again": TENSOR | FULL,
    "pipeline, expert layers made again": PIPELINE | SOME,
    "pipeline, interleaved": PIPELINE | {"pipeline_model_parallel_layout": "E|tt|tt|L"} | FULL,
    "context": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
}
EXPERTS, TOP_K, LAYERS = 8, 2, 3
FAMILIES = {
    "glm4-moe": {"n_routed_experts": EXPERTS, "num_hidden_layers": LAYERS + 1, "first_k_dense_replace": 1},
    "qwen3-moe": {"num_experts": EXPERTS, "num_hidden_layers": LAYERS + 1, "mlp_only_layers": [0]},
}
CASES = {
    **{layout: ("glm4-moe", "rollout", layout) for layout in LAYOUTS},
    "of the scoring pass, tensor": ("glm4-moe", "policy", "tensor, layers made again"),
    "of the scoring pass, pipeline": ("glm4-moe", "policy", "pipeline, interleaved"),
    "softmax of the given logits": ("qwen3-moe", "rollout", "data"),
}
RARE = ("data", "pipeline, interleaved", "of the scoring pass, tensor")
"""Each is a layout and a kind that other cases have."""
BY_DAY = [case for case in CASES if case not in RARE]


def with_experts(batch):
    """The batch with experts drawn for every token but the last of a sample."""
    draw = np.random.default_rng(5)
    batch.routed_experts = []
    for length in batch.lengths.tolist():
        order = draw.random((length - 1, LAYERS, EXPERTS)).argsort(-1)
        batch.routed_experts.append(order[..., :TOP_K].astype(np.uint8))
    return batch


def gradients_of(worker, batch, kind):
    """Gradients of a step by name, after `policy` scored with it and routers have other weights; and the mismatch."""
    worker.score(batch, frozenset({"policy"}))
    worker.routing_differences()
    if kind == "policy":
        change_routers(worker)
    rank_batch = worker.partitioner().partition(batch)[worker.dp_rank.number]
    micros = worker.packs(rank_batch)[0]
    with worker._routed(rank_batch, "train") if hasattr(worker.policy, "stage") else nullcontext():
        _, grads = worker.gradients(rank_batch, micros)
    return grads, worker._routing_mismatch()["routing_mismatch"]


@torch.no_grad()
def change_routers(worker):
    """Reverse the experts of every router."""
    model = worker.policy.stage if hasattr(worker.policy, "stage") else worker.policy.hf
    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            module.weight.copy_(module.weight.flip(0))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of both models, and FSDP's gradients of each kind of replay, FAMILY-KIND.safetensors."""
    from trainer_bench import Bench, batch_of

    path = tmp_path_factory.mktemp("root")
    for family, sizes in FAMILIES.items():
        family_model(path / family, family, **sizes)
    for family, kind in {case[:2] for case in CASES.values()}:
        bench = Bench(path / family, routing_replay=kind)
        grads, mismatch = bench.thread.call(gradients_of, bench.worker, with_experts(batch_of()), kind)
        assert mismatch > 0.5
        save_file({name: grad.contiguous() for name, grad in grads.items()}, path / f"{family}-{kind}.safetensors")
        bench.thread.close()
    return path


@pytest.fixture(scope="module", params=[BY_DAY, pytest.param(RARE, marks=pytest.mark.nightly)], ids=["day", "night"])
def ranks(request, zygote, root, tmp_path_factory):
    """What both ranks returned."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), replayed, 2, root, request.param)


def test_gradients_of_any_layout_with_given_experts_are_those_of_fsdp(ranks):
    for returned in ranks:
        for case, (error, mismatch, *_) in returned.items():
            assert error < 1e-4, case
            assert mismatch > 0.5, case


def test_experts_of_a_step_are_two_bytes_each_on_the_host_and_wait_only_for_layers_made_again(ranks):
    for returned in ranks:
        for case, (*_, kinds, waiting) in returned.items():
            assert kinds == [["ndarray", "int16"]], case
            assert bool(waiting) == ("recompute_granularity" in LAYOUTS[CASES[case][2]]), case


def watch_waiting(worker):
    """A list that each pass of a router appends to: micro-batches whose experts it keeps for the backward pass."""
    counts = []
    for module in worker.policy.stage.modules():
        if hasattr(module, "router_replay"):
            module.register_forward_hook(lambda m, *_: counts.append(len(m.router_replay.waiting)))
    return counts


def arrays_of(worker, batch):
    """Types of what holds the experts of a step's micro-batches before it begins."""
    rank_batch = worker.partitioner().partition(batch)[worker.dp_rank.number]
    with worker._routed(rank_batch, "train"):
        experts = [worker.policy.passes._work(micro).experts for micro in worker.packs(rank_batch)[0]]
    return sorted({(type(one).__name__, str(one.dtype)) for one in experts})


def one_by_name(grads, name):
    """A gradient by transformers' name, which has a layer's experts as one tensor."""
    prefix, _, kind = name.rpartition("mlp.experts.")
    if not prefix:
        return grads[name]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    stored = f"{prefix}mlp.experts"
    return torch.stack([torch.cat([grads[f"{stored}.{e}.{part}.weight"] for part in parts]) for e in range(EXPERTS)])


def replayed(rank, root, cases):
    """By case: the largest error of a gradient, relative to its size, the mismatch, what holds the experts of the
    step's micro-batches, and of how many of them a router keeps some.
    """
    returned = {}
    for case in cases:
        family, kind, layout = CASES[case]
        expected = load_file(root / f"{family}-{kind}.safetensors")
        ranks = Ranks(root, family, LAYOUTS[layout], rank, 2, routing_replay=kind)
        batch, waiting = with_experts(ranks.batch), watch_waiting(ranks.worker)
        grads, mismatch = gradients_of(ranks.worker, batch, kind)
        errors = [
            float((one_by_name(grads, name) - grad).abs().max() / grad.abs().max().clamp(min=1e-6))
            for name, grad in expected.items()
        ]
        returned[case] = [max(errors), mismatch, arrays_of(ranks.worker, batch), max(waiting)]
    return returned


if __name__ == "__main__":
    answer(replayed)
