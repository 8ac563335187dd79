"""One GRPO step's loss and every gradient, against a float64 recomputation from the samples; and what may not matter."""

import dataclasses

import numpy as np
import pytest
import ref_grpo
import ref_model
import torch
import trainer_bench as made

pytestmark = pytest.mark.unit

FAMILIES = ["qwen3", "qwen2", "llama"]


def samples_of(batch):
    """(tokens, response length, first response token) of each sample."""
    for i in range(len(batch)):
        tokens = batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist()
        yield tokens, int(batch.response_lengths[i]), int(batch.response_offsets[i])


def reference(bench, batch, *, temperature=1.0, aggregation="rollout_mean", **loss):
    """Loss and gradients in float64, sequence by sequence and token by token."""
    params = {n: t.double().requires_grad_() for n, t in bench.parameters().items()}
    losses, masks = [], []
    for tokens, count, start in samples_of(batch):
        log_probs, entropy = ref_model.log_probs(params, bench.folder.config, tokens, count, temperature)
        row = []
        for t in range(count):
            column = {name: float(values[start + t]) for name, values in batch.columns.items()}
            old = column["policy"] if "policy" in column else log_probs[t].detach()
            ref = column.get("reference")
            row.append(
                ref_grpo.token_loss(
                    log_probs[t], old, column["advantages"], 0.2, 0.28, ref=ref, entropy=entropy[t], **loss
                )
            )
        losses.append(row)
        masks.append(batch.loss_mask[start : start + count].tolist())
    if aggregation == "token_mean":
        total = ref_grpo.mean_over_tokens(losses, masks)
    else:
        total = ref_grpo.mean_over_rollouts(losses, masks, batch.rollout.tolist())
    return total.item(), dict(zip(params, torch.autograd.grad(total, list(params.values()))))


def assert_same(got, want, tolerance=2e-5):
    """Within float32 rounding of the largest entry of each gradient."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    for name, gradient in want[1].items():
        scale = max(float(gradient.abs().max()), 1e-6)
        error = float((got[1][name].double() - gradient.double()).abs().max()) / scale
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_float64_reference(bench, family):
    one, batch = bench(family, eps_clip_high=0.28, max_tokens_per_gpu=64), made.batch_of()
    assert_same(one.gradient(batch), reference(one, batch))


def test_old_log_probs_kl_entropy_and_temperature_equal_the_reference(bench):
    one = bench(
        "qwen3", tied=True, eps_clip_high=0.28, max_tokens_per_gpu=64, kl_loss_coef=0.1, kl_loss_type="k3",
        entropy_coef=0.01,
    )  # fmt: skip
    batch = made.batch_of(temperature=0.7)
    scored = one.call("score", batch, frozenset({"policy", "reference"}))
    draw = np.random.default_rng(1)
    for role in ("policy", "reference"):
        noise = draw.normal(size=len(batch.loss_mask)) * 0.3
        batch.columns[role] = (scored[role]["log_probs"] + noise).astype(np.float32)
    want = reference(one, batch, temperature=0.7, kl_coef=0.1, entropy_coef=0.01)
    assert_same(one.gradient(batch), want)


def test_token_mean_equals_the_reference(bench):
    one, batch = bench("llama", eps_clip_high=0.28, loss_aggregation="token_mean"), made.batch_of()
    assert_same(one.gradient(batch), reference(one, batch, aggregation="token_mean"))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_packs_equal_the_reference_one_by_one(bench, family):
    one, batch = bench(family, max_tokens_per_gpu=48), made.batch_of()
    found = one.call("score", batch, frozenset({"policy"}))["policy"]
    params = {n: t.double() for n, t in one.parameters().items()}
    for tokens, count, start in samples_of(batch):
        log_probs, entropy = ref_model.log_probs(params, one.folder.config, tokens, count)
        np.testing.assert_allclose(found["log_probs"][start : start + count], log_probs, atol=2e-5)
        np.testing.assert_allclose(found["entropy"][start : start + count], entropy, atol=2e-5)


@pytest.mark.parametrize("max_tokens", [1, 17, 40, 10_000])
def test_the_size_of_packs_changes_nothing(bench, max_tokens):
    batch = made.batch_of()
    assert_same(bench(max_tokens_per_gpu=max_tokens).gradient(batch), bench(max_tokens_per_gpu=100).gradient(batch))


def test_the_order_of_groups_changes_nothing(bench):
    one = bench(max_tokens_per_gpu=50)
    groups = made.groups_of()
    batches = [made.make_batch(0, "main", order) for order in (groups, groups[::-1])]
    for batch in batches:
        batch.columns["advantages"] = batch.columns["rollout_log_probs"]
    assert_same(one.gradient(batches[0]), one.gradient(batches[1]))


def test_recomputing_layers_gives_the_same_gradient(bench):
    batch = made.batch_of()
    with_, without = (bench(gradient_checkpointing=flag).gradient(batch) for flag in (True, False))
    assert_same(with_, without, 1e-6)


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_chunk_of_log_probs_changes_nothing(bench, chunk):
    batch = made.batch_of()
    assert_same(bench(logprob_chunk_tokens=chunk).gradient(batch), bench().gradient(batch))


def test_the_same_batch_and_state_give_the_same_bits(bench):
    batch, one = made.batch_of(), bench(max_tokens_per_gpu=50)
    first, second = one.gradient(batch), one.gradient(batch)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_bfloat16_compute_is_close(bench):
    batch = made.batch_of()
    half, full = (bench(dtype=dtype).gradient(batch) for dtype in ("bfloat16", "float32"))
    assert half[0] == pytest.approx(full[0], abs=0.02)
    for name, gradient in full[1].items():
        cosine = torch.nn.functional.cosine_similarity(half[1][name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.98, (name, cosine)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_the_policy_in_another_dtype_is_what_a_trainer_in_that_dtype_has(bench, family, tied):
    batch = made.batch_of(temperature=0.7)
    roles = frozenset({"policy", "float32", "bfloat16"})
    half, full = (bench(family, tied=tied, dtype=dtype) for dtype in ("bfloat16", "float32"))
    scores = [
        {role: row["log_probs"] for role, row in one.call("score", batch, roles).items()} for one in (half, full)
    ]
    assert all((score["bfloat16"] == scores[0]["policy"]).all() for score in scores)
    assert all((score["float32"] == scores[1]["policy"]).all() for score in scores)
    assert 0 < abs(scores[0]["policy"] - scores[1]["policy"]).max() < 0.1


def test_masked_tokens_have_no_say(bench):
    one, batch = bench(), made.batch_of()
    other = dataclasses.replace(batch, columns=dict(batch.columns))
    other.columns["advantages"] = np.where(batch.loss_mask > 0, batch.columns["advantages"], 1e6).astype(np.float32)
    assert_same(one.gradient(other), one.gradient(batch), 1e-7)


def test_siblings_of_a_rollout_share_its_weight(bench):
    """Splitting one rollout's weight over two samples is the mean over their tokens together."""
    one, groups = bench(eps_clip_high=0.28), made.groups_of(groups=1, rollouts=2)
    batch = made.make_batch(0, "main", groups)
    assert batch.rollout.tolist() == [0, 1, 1]
    batch.columns["advantages"] = np.ones(len(batch.loss_mask), np.float32)
    assert_same(one.gradient(batch), reference(one, batch))


def test_supervised_loss_is_the_mean_negative_log_prob(bench):
    one, batch = bench(loss_type="sft_loss", loss_aggregation="token_mean"), made.batch_of()
    found = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    assert one.gradient(batch)[0] == pytest.approx(-found[batch.loss_mask > 0].mean(), rel=1e-5)
