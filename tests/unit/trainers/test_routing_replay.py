"""Routing replay of the FSDP trainer: the numbers of a model whose experts are given, and gradients of its routers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trainer_bench as made
from splits import difference, step_of

from slime_core.errors import ConfigError, TrainerError
from slime_core.testing.families import family_model

pytestmark = pytest.mark.unit

EXPERTS, TOP_K, LAYERS = 8, 2, 2
FAMILIES = {
    "qwen3-moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "glm4-moe": {"n_routed_experts": EXPERTS, "num_hidden_layers": 3, "routed_scaling_factor": 1.5},
    "gpt-oss": {"num_local_experts": EXPERTS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(family)` is its model folder, written once."""
    base, folders = tmp_path_factory.mktemp("models"), {}

    def make(family):
        if family not in folders:
            folders[family] = family_model(base / family, family, **FAMILIES[family])
        return folders[family]

    return make


def batch_with(rows, **kwargs):
    """A batch whose samples have ``rows(tokens)`` as experts, of all tokens but the last."""
    batch = made.batch_of(groups=2, rollouts=2, **kwargs)
    ends = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist())
    batch.routed_experts = [rows(batch.tokens[a : b - 1]) for a, b in ends]
    return batch


def drawn(tokens):
    """Two experts a token and layer, a function of the tokens, so that samples of a prompt agree about it."""
    numbers = np.cumsum(np.asarray(tokens, dtype=np.int64))[:, None] * 7 + np.arange(LAYERS) * 3
    first = numbers % EXPERTS
    return np.stack([first, (first + 1 + numbers % 5) % EXPERTS], axis=-1).astype(np.uint8)


def own_choice(bench):
    """`rows(tokens)`: what transformers' routers choose, seen by hooks."""

    def rows(tokens):
        chosen, hf = [], bench.folder.build_model("float32")
        for module in hf.modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(lambda m, i, out: chosen.append(out[2]))
        with torch.no_grad():
            hf(torch.tensor(tokens[None].astype(np.int64)))
        return torch.stack(chosen, 1).numpy().astype(np.uint8)

    return rows


class Forced:
    """A Qwen3-MoE whose routers get their experts; R3's weights: a softmax over all, those of the given to sum 1."""

    def __init__(self, hf):
        self.rows, self.hf = None, hf
        routers = [m for m in hf.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
        for layer, router in enumerate(routers):
            router.forward = lambda x, layer=layer, router=router: self.route(x, layer, router)

    def route(self, x, layer, router):
        logits = F.linear(x, router.weight)
        experts = torch.from_numpy(self.rows[:, layer].astype(np.int64))
        scores = torch.zeros_like(logits).scatter_(1, experts, 1.0) * logits.exp()
        return logits, (scores / scores.sum(-1, keepdim=True)).gather(1, experts), experts


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_log_probs_and_gradients_are_those_of_a_model_with_the_given_experts(folder, bench, recompute):
    """Against one sequence at a time in float64, at a ratio of 1, where the loss is -advantage * log-prob.

    Its last token, which nobody routed, reaches no log-prob.
    """
    b = bench(
        folder=folder("qwen3-moe"), routing_replay="rollout", max_tokens_per_gpu=60, gradient_checkpointing=recompute
    )
    batch = batch_with(drawn)
    log_probs = b.thread.call(b.worker.score, batch, frozenset({"policy"}))["policy"]["log_probs"]
    _, grads = b.thread.call(step_of, b.worker, batch)
    forced = Forced(b.folder.build_model("float32").double().requires_grad_(True))
    forced.hf.set_experts_implementation("eager")
    expected = []
    for i in range(len(batch)):
        tokens = torch.tensor(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        forced.rows = batch.routed_experts[i]
        out = forced.hf(tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        expected.append(out.gather(1, tokens[1:, None])[-int(batch.response_lengths[i]) :, 0])
    np.testing.assert_allclose(log_probs, torch.cat(expected).detach().numpy(), atol=2e-5)
    (rank_batch,) = b.worker.partitioner().partition(batch)
    weights = torch.from_numpy(rank_batch.weights * batch.columns["advantages"]).double()
    (-(weights * torch.cat(expected)).sum()).backward()
    for name, parameter in forced.hf.named_parameters():
        want = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        bound = 1e-4 * float(want.abs().max().clamp(min=1e-6))
        assert float((grads[name] - want).abs().max()) <= bound, name
    assert any(float(grads[name].abs().max()) > 0 for name in grads if "gate.weight" in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_routers_own_choice_changes_no_bit_and_is_no_mismatch(folder, bench, family):
    own, replaying = (bench(folder=folder(family), routing_replay=kind) for kind in ("off", "rollout"))
    batch = batch_with(own_choice(own))
    (loss, grads), (loss_again, grads_again) = (b.thread.call(step_of, b.worker, batch) for b in (own, replaying))
    assert loss == loss_again
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name
    assert replaying.thread.call(replaying.worker._routing_mismatch) == {"routing_mismatch": 0.0}


def test_the_mismatch_counts_tokens_and_layers_whose_own_choice_was_another(folder, bench):
    """In the first layer all rows have experts that their router did not choose, in the second those of before."""
    b = bench(folder=folder("qwen3-moe"), routing_replay="rollout")
    choose = own_choice(b)

    def rows(tokens):
        experts = choose(tokens)
        others = [[e for e in range(EXPERTS) if e not in row][:TOP_K] for row in experts[:, 0].tolist()]
        experts[:, 0] = others
        return experts

    metrics = b.thread.call(b.worker.step, batch_with(rows))
    assert 0.5 <= metrics["routing_mismatch"] < 1  # of all first layers, and where that made the second another


def test_experts_of_dense_layers_too_are_read_by_the_layers_that_have_some(folder, bench):
    """GLM's first layer is dense; SGLang's rows have it."""
    b = bench(folder=folder("glm4-moe"), routing_replay="rollout")
    assert b.worker.policy.routers.layers == [1, 2]
    batch = batch_with(drawn)
    totals, grads = b.thread.call(step_of, b.worker, batch)
    batch.routed_experts = [np.concatenate([np.full_like(e[:, :1], 255), e], axis=1) for e in batch.routed_experts]
    totals_again, grads_again = b.thread.call(step_of, b.worker, batch)
    assert totals == totals_again
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_training_replays_the_choice_of_the_pass_that_made_the_old_log_probs(folder, bench):
    """The weights of routers change between scoring and training, and with them what routers choose themselves."""
    b = bench(folder=folder("qwen3-moe"), routing_replay="policy", num_steps_per_rollout=2)
    batch = batch_with(own_choice(b))
    expected = bench(folder=folder("qwen3-moe"), routing_replay="rollout", num_steps_per_rollout=2)
    results = []
    for one in (b, expected):
        columns = one.thread.call(one.worker.score, batch, frozenset({"policy"}))["policy"]
        batch.columns["policy"] = columns["log_probs"]
        with torch.no_grad():
            for name, parameter in one.worker.actor.locals().items():
                if name.endswith("gate.weight"):
                    parameter.copy_(parameter.flip(0))
        results.append(one.thread.call(step_of, one.worker, batch))
        assert one.thread.call(one.worker._routing_mismatch)["routing_mismatch"] > 0.2
        rank_batch = one.worker.partitioner().partition(batch)[0]
        routing, micro = one.worker.routing, one.worker.packs(rank_batch, one.worker.policy)[0][0]
        rows = routing.recorded(micro) if one is b else routing.rows(batch, micro)
        assert rows.nbytes == 2 * len(micro.tokens) * LAYERS * TOP_K  # numpy: on the host
    assert difference(*results)[0] < 1e-4
    b.worker.routing.forget()
    with pytest.raises(TrainerError, match="were not recorded"):
        b.thread.call(step_of, b.worker, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: None, "sample main/0-2.* has no routed experts"),
        (lambda e: e[:-2], r"sample main/0-2.* has routed experts of \d+ tokens"),
        (lambda e: np.repeat(e, 3, axis=0), r"sample main/0-2.* has routed experts of \d+ tokens"),
        (lambda e: e[:, :1], "sample main/0-2.* has routed experts of 1 x 2 a token"),
        (lambda e: e[:, :, :1], "sample main/0-2.* has routed experts of 2 x 1 a token"),
        (lambda e: np.where(e == e[0, 0, 0], 200, e), "sample main/0-2.* has routed expert 200"),
        (lambda e: np.where(e == e[0, 0, 1], -1, e.astype(np.int16)), "sample main/0-2.* has routed expert -1"),
    ],
    ids=["none", "too-few", "too-many", "layers", "experts", "of another model", "below 0"],
)
def test_experts_that_are_missing_or_do_not_fit_are_an_error_that_names_the_sample(folder, bench, change, message):
    b = bench(folder=folder("qwen3-moe"), routing_replay="rollout")
    batch = batch_with(drawn)
    batch.loss_mask[:] = 1
    batch.routed_experts[2] = change(batch.routed_experts[2])
    with pytest.raises(TrainerError, match=message.replace("main/0-2.*", batch.sample_ids[2])) as error:
        b.thread.call(b.worker.step, batch)
    assert error.value.code == "TRN110"


def test_rows_behind_the_last_token_that_trains_may_be_missing(folder, bench):
    """An observation after the last turn: its rows choose their own experts, and no trained token sees them."""
    b = bench(folder=folder("qwen3-moe"), routing_replay="rollout")
    batch = batch_with(drawn)
    batch.loss_mask[batch.response_offsets[1:] - 1] = 0
    batch.loss_mask[batch.response_offsets[:-1]] = 1
    results = [b.thread.call(step_of, b.worker, batch)]
    cut = [e[: len(e) - 1] if n > 1 else e for e, n in zip(batch.routed_experts, batch.response_lengths)]
    batch.routed_experts = cut
    results.append(b.thread.call(step_of, b.worker, batch))
    (_, grads), (_, grads_again) = results
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_again[name], atol=1e-7, rtol=1e-5)


def test_a_dense_model_has_nothing_to_replay(bench):
    with pytest.raises(ConfigError, match="the experts of Qwen3ForCausalLM cannot be replayed"):
        bench(routing_replay="rollout")
