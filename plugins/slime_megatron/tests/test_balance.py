"""The load of experts, router biases and auxiliary losses of Megatron's routers, at every form of parallelism.

Two ranks do all of it; the load is compared with transformers' routers, one sample at a time.
"""

import pytest
import torch
from megatron_ranks import PIPELINE, TENSOR, Ranks, answer, run_ranks

from slime_core.testing.families import family_model
from slime_core.trainers.fsdp.experts import router_biases
from slime_core.trainers.fsdp.model import fingerprint
from slime_core.weights.folder import ModelFolder

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

RATE, COEFFICIENT = 0.125, 0.25
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "data": {},
    "tensor": TENSOR,
    "pipeline, layers made again": PIPELINE | RECOMPUTED,
    "pipeline, interleaved": PIPELINE | {"pipeline_model_parallel_layout": "E|t|t|L"},
    "context": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
}
AUXILIARY = ("data", "tensor", "pipeline, interleaved", "context")
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FAMILY = {"n_routed_experts": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of a model, a dense layer before one of experts."""
    path = tmp_path_factory.mktemp("root")
    family_model(path / "moe", "glm4-moe", **FAMILY)
    return path


@pytest.fixture(scope="module")
def ranks(zygote, root, tmp_path_factory):
    """What both ranks returned."""
    return run_ranks(zygote, tmp_path_factory.mktemp("said"), balanced, 2, root)


@pytest.fixture(scope="module")
def load(root):
    """Tokens of each expert, [experts]."""
    from test_expert_load import load_of
    from trainer_bench import batch_of

    return load_of(ModelFolder.open(root / "moe").build_model("float32"), batch_of(), FAMILY["n_routed_experts"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_load_of_any_layout_is_that_of_samples_one_by_one_and_biases_follow_it(ranks, load, layout):
    for returned in ranks:
        assert returned[layout]["load"] == [[0] * len(load), load.tolist()]
        assert returned[layout]["violation"] == pytest.approx(float(load.max() / load.double().mean() - 1))
    expected = (RATE * torch.sign(load.double().mean() - load)).tolist()
    assert ranks[0][layout]["bias"] == expected


def test_biases_are_restored_and_a_skipped_step_leaves_them(ranks):
    assert ranks[0]["restored"] == ranks[0]["saved"] != ranks[0]["expert"]["bias"]
    assert ranks[0]["skipped"] == ranks[0]["saved"]


def test_the_fingerprint_has_the_biases_once_as_the_other_backends(root, ranks):
    model = ModelFolder.open(root / "exported").build_model("float32")
    biases = router_biases(model)
    assert biases[BIAS].tolist() == ranks[0]["saved"]
    expected = fingerprint(dict(model.named_parameters()) | biases, 1)
    assert [returned["fingerprints"] for returned in ranks] == [[expected, expected]] * 2
    biases[BIAS][0] += RATE
    assert fingerprint(dict(model.named_parameters()) | biases, 1) != expected


@pytest.mark.parametrize("layout", AUXILIARY)
def test_an_auxiliary_loss_adds_its_coefficient_times_its_mean_over_rows_without_filling(ranks, layout):
    for returned in ranks:
        error, filling = returned["auxiliary"][layout]
        assert error < 1e-4
        assert filling == 0


def balanced(rank, root):
    """A step at every layout; then the state of the last one; then auxiliary losses."""
    returned = {}
    for name, flags in LAYOUTS.items():
        ranks = Ranks(root, "moe", flags, rank, 2, moe_router_bias_update_rate=RATE)
        metrics = ranks.worker.step(ranks.batch)
        violation = metrics["moe/load_max_violation"]
        load = ranks.worker.expert_load.counts.tolist()
        returned[name] = {"load": load, "violation": violation, "bias": bias_of(ranks)}
    ranks.step()
    for router in routers_of(ranks.worker):
        router.expert_bias += RATE * torch.arange(FAMILY["n_routed_experts"])
    returned["saved"] = bias_of(ranks)
    ranks.save(root / "saved")
    fingerprints = [ranks.worker.fingerprint()]
    ranks.batch.columns["advantages"][:] = 0
    assert ranks.worker.step(ranks.batch)["skipped_steps/no_gradient"] == 1
    returned["skipped"] = bias_of(ranks)
    other = Ranks(root, "moe", TENSOR, rank, 2, moe_router_bias_update_rate=RATE)
    other.restore(root / "saved")
    returned["restored"] = bias_of(other)
    returned["fingerprints"] = [*fingerprints, other.worker.fingerprint()]
    other.worker.export(root / "exported")
    returned["auxiliary"] = {name: auxiliary(root, LAYOUTS[name], rank) for name in AUXILIARY}
    return returned


def routers_of(worker):
    """The routers of this rank's layers of experts."""
    return [module for module in worker.policy.stage.modules() if hasattr(module, "routing")]


def bias_of(ranks):
    """The router's bias as engines are sent it; rank 0 has it."""
    from slime_core.weights.transports.buckets import stream

    for parts, tensor in stream(ranks.worker.sources()):
        if parts[0].name == BIAS and ranks.worker.rank == 0:
            bias = parts[0].cut(tensor).tolist()
    return bias if ranks.worker.rank == 0 else None


def auxiliary(root, flags, rank):
    """The relative error of what an auxiliary loss adds to the router's gradient; what to that of filling's token."""
    added, filling = 0.0, 0.0
    for sign, more in ((-1, {}), (1, BALANCED)):
        ranks = Ranks(root, "moe", flags | more, rank, 2, use_rollout_logprobs=True)
        worker = ranks.worker
        passes = []
        for router in routers_of(worker):
            router.register_forward_hook(
                lambda router, args, output, passes=passes: passes.append((router, args, output[1]))
            )
        (rank_batch,) = worker.partitioner().partition(ranks.batch)[worker.dp_rank.number :][:1]
        gradients = worker.gradients(rank_batch, worker.packs(rank_batch)[0])[1]
        added = added + sign * gradients["model.layers.1.mlp.gate.weight"]
        filling = filling + sign * gradients["model.embed_tokens.weight"][0]
    expected = summed_by_hand(passes, added.shape)
    return float((added - expected).norm() / expected.norm()), float(filling.norm())


def summed_by_hand(passes, shape):
    """Gradient of COEFFICIENT * mean over rows of experts / k * sum_e (share of e in the choice) * (mean score of e).

    Ranks of the same rows count them as often in the gradient as in the rows; stages without the router count nothing.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    sums = torch.zeros(shape.numel() + 1, dtype=torch.float64)
    group = parallel_state.get_tensor_and_context_parallel_group()
    for router, (hidden, filling), chosen in passes:
        weight = router.weight.detach().double().requires_grad_()
        hidden, chosen = (
            every(x.detach().flatten(0, -2).double(), group)[~every(filling.flatten(), group)]
            for x in (hidden, chosen)
        )
        scores = torch.sigmoid(hidden @ weight.T)
        scores = scores / scores.sum(-1, keepdim=True)
        share = chosen.mean(0) / router.config.moe_router_topk
        (len(hidden) * len(share) * (share * scores.mean(0)).sum()).backward()
        sums += torch.cat([weight.grad.flatten(), torch.tensor([len(hidden)])])
    dist.all_reduce(sums)
    return COEFFICIENT * sums[:-1].view(shape) / sums[-1]


def every(rows, group):
    """The rows of all ranks of a group, one rank's after the other's."""
    import torch.distributed as dist

    parts = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


if __name__ == "__main__":
    answer(balanced)
