"""The optimizer, its schedule and the clip, by hand; whole steps; what stops a step."""

import asyncio
import math

import numpy as np
import pytest
import ref_grpo
import torch
import trainer_bench as made

from slime_core.errors import TrainerError
from slime_core.trainers.fsdp.adamw import AdamW, clip_scale, global_norm
from slime_core.trainers.fsdp.places import DevicePlace
from slime_core.trainers.optimizer_step import Schedule, optimizer_steps

pytestmark = pytest.mark.unit

batch_of = made.batch_of


def test_adamw_equals_the_paper_with_decay_on_matrices_only():
    torch.manual_seed(0)
    start = {"matrix": torch.randn(3, 4), "vector": torch.randn(4)}
    optimizer = AdamW(0.9, 0.98, 1e-8, 0.1)
    params = {name: tensor.clone() for name, tensor in start.items()}
    want = {name: (tensor.double(), 0.0, 0.0) for name, tensor in start.items()}
    for step in (1, 2, 3):
        grads = {name: torch.randn_like(tensor) for name, tensor in start.items()}
        optimizer.step(params, grads, lr=0.01 * step)
        for name, (p, m, v) in want.items():
            want[name] = ref_grpo.adamw(
                p, grads[name].double(), m, v, step, lr=0.01 * step, beta1=0.9, beta2=0.98, eps=1e-8,
                decay=0.1 if name == "matrix" else 0.0,
            )  # fmt: skip
    for name, (p, *_) in want.items():
        torch.testing.assert_close(params[name].double(), p, rtol=1e-5, atol=1e-6)


def test_the_first_adam_step_is_the_learning_rate():
    # m_hat / sqrt(v_hat) = g / |g|
    params = {"w": torch.tensor([1.0, 1.0])}
    AdamW(0.9, 0.98, 0.0, 0.0).step(params, {"w": torch.tensor([5.0, -0.001])}, lr=0.25)
    torch.testing.assert_close(params["w"], torch.tensor([0.75, 1.25]))


def test_clipping_scales_to_the_limit_and_leaves_smaller_gradients_alone():
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert global_norm(grads, 1, DevicePlace()) == pytest.approx(5.0)
    assert clip_scale(5.0, 10.0) == clip_scale(5.0, 0.0) == 1.0
    assert clip_scale(5.0, 1.0) == pytest.approx(0.2)
    steps = {}
    for scale in (1.0, 0.2):
        params = {"b": torch.tensor([[1.0]])}
        optimizer = AdamW(0.0, 0.0, 1.0, 0.0)  # a step of g / (|g| + 1)
        optimizer.step(params, {"b": grads["b"].clone()}, lr=1.0, scale=scale)
        steps[scale] = 1 - params["b"].item()
    assert steps == pytest.approx({1.0: 4 / 5, 0.2: 0.8 / 1.8})


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        (
            "cosine",
            [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1],
        ),
    ],
)
def test_the_rate_warms_up_and_decays(style, rates):
    schedule = Schedule(peak=1.0, low=0.1, style=style, warmup=2, decay=6)
    assert [schedule.at(step) for step in range(7)] == pytest.approx(rates)
    assert schedule.at(100) == pytest.approx(rates[-1])


@pytest.mark.parametrize(
    ("train", "steps"), [({}, 5), ({"num_steps_per_rollout": 4}, 20), ({"global_batch_size": 5}, 20)]
)
def test_optimizer_steps_of_a_stage(train, steps):
    rollout = {"num_rollout": 5, "rollout_batch_size": 4, "n_samples_per_prompt": 4}
    assert optimizer_steps(made.config_of("x", rollout=rollout, **train)) == steps


def test_several_optimizer_steps_equal_steps_on_the_parts(bench):
    """Two optimizer steps of one rollout are one step on its first rollouts and then one on the rest."""
    batch = batch_of(fan_out=False)
    two, parts = bench(num_steps_per_rollout=2, max_tokens_per_gpu=50), bench(max_tokens_per_gpu=50)
    batch.columns["policy"] = two.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    metrics = two.call("step", batch)
    assert metrics["optimizer_steps"] == 2.0
    assert metrics["ppo_kl"] != 0.0
    groups = made.groups_of(fan_out=False)
    samples = [(g, i) for g in range(3) for i in range(4)]
    for half in (samples[:6], samples[6:]):
        mine = [made.subset(groups[g], [i for gg, i in half if gg == g]) for g in range(3)]
        part = made.make_batch(0, "main", [g for g in mine if g.samples])
        rows = np.isin(
            batch.sample_of_token(), [s for s, name in enumerate(batch.sample_ids) if name in part.sample_ids]
        )
        part.columns.update({n: v[rows] for n, v in batch.columns.items()})
        parts.call("step", part)
    want, got = parts.parameters(), two.parameters()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=2e-6, rtol=1e-5)


def test_one_optimizer_step_reports_its_figures(bench):
    one, batch = bench(clip_grad=0.001), batch_of()
    loss, grads = one.gradient(batch)
    metrics = one.call("step", batch)
    assert metrics["loss"] == loss
    assert metrics["grad_norm"] == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    )
    assert metrics["lr"] == 1e-3
    assert metrics["train_tokens"] == batch.loss_mask.sum()
    assert metrics["clip_fraction"] == metrics["ppo_kl"] == 0.0
    assert metrics["entropy"] == pytest.approx(math.log(one.folder.vocab_size), rel=0.02)


def test_a_step_with_everything_masked_changes_nothing_and_is_counted(bench):
    one, batch = bench(), batch_of()
    before = one.parameters()
    batch.loss_mask[:] = 0
    metrics = one.call("step", batch)
    assert metrics["skipped_steps"] == 1.0
    assert metrics["optimizer_steps"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(before[name], after) for name, after in one.parameters().items())


def test_a_loss_that_is_not_finite_names_its_samples_and_changes_nothing(bench):
    one, batch = bench(max_tokens_per_gpu=40), batch_of()
    before = one.parameters()
    row = int(batch.response_offsets[5])
    batch.columns["advantages"][row] = np.inf
    with pytest.raises(TrainerError) as caught:
        one.call("step", batch)
    assert caught.value.code == "TRN95"
    assert batch.sample_ids[5] in caught.value.what
    assert batch.sample_ids[4] not in caught.value.what
    assert all(torch.equal(before[name], after) for name, after in one.parameters().items())
    batch.columns["advantages"][row] = 1.0
    assert math.isfinite(one.call("step", batch)["loss"])


def test_weights_that_are_not_finite_are_found_when_scoring(bench):
    one, batch = bench(), batch_of()
    next(iter(one.worker.actor.locals().values()))[5] = math.nan
    with pytest.raises(TrainerError, match="TRN95"):
        one.call("score", batch, frozenset({"policy"}))


def test_a_token_outside_the_vocabulary_is_refused_by_name(bench):
    one, batch = bench(), batch_of()
    batch.tokens[batch.offsets[4]] = one.folder.vocab_size
    with pytest.raises(TrainerError, match=rf"TOK44 sample {batch.sample_ids[4]} "):
        one.call("step", batch)


@pytest.mark.parametrize("name", ["advantages"])
def test_a_missing_column_is_named(bench, name):
    one, batch = bench(), batch_of()
    del batch.columns[name]
    with pytest.raises(TrainerError, match=name):
        one.call("step", batch)


def test_a_column_of_another_length_is_refused(bench):
    one, batch = bench(), batch_of()
    batch.columns["advantages"] = batch.columns["advantages"][:-1]
    with pytest.raises(TrainerError, match="TRN102"):
        one.call("step", batch)


def test_a_role_that_lives_elsewhere_is_refused(bench):
    with pytest.raises(TrainerError, match="reference"):
        bench().call("score", batch_of(), frozenset({"reference"}))


def test_calls_between_release_and_reacquire_are_refused(bench):
    one, batch = bench(), batch_of()

    async def run():
        await one.trainer.release({"optimizer", "gradients"})
        await one.trainer.score(batch, frozenset({"policy"}))
        with pytest.raises(TrainerError, match="optimizer"):
            await one.trainer.step(batch)
        await one.trainer.reacquire({"optimizer", "gradients"})
        return await one.trainer.step(batch)

    assert asyncio.run(run())["optimizer_steps"] == 1.0


def test_the_reference_is_the_stages_start(bench):
    one, batch = bench(kl_loss_coef=0.1), batch_of()
    start = one.call("score", batch, frozenset({"policy", "reference"}))
    np.testing.assert_array_equal(start["policy"]["log_probs"], start["reference"]["log_probs"])
    batch.columns["reference"] = start["reference"]["log_probs"]
    assert abs(one.call("step", batch)["kl_loss"]) < 1e-8
    later = one.call("score", batch, frozenset({"policy", "reference"}))
    np.testing.assert_array_equal(later["reference"]["log_probs"], start["reference"]["log_probs"])
    assert np.abs(later["policy"]["log_probs"] - start["policy"]["log_probs"]).max() > 1e-3


def test_the_reference_can_be_another_folder(bench, tmp_path):
    from slime_core.testing import tiny_model

    other = tiny_model(tmp_path / "other", seed=8)
    one, batch = bench(kl_loss_coef=0.1, ref_load=str(other)), batch_of()
    found = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    want = bench(folder=other).call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_array_equal(found, want)


def test_a_reference_of_another_shape_is_refused(bench, tmp_path):
    from slime_core.testing import tiny_model

    other = tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(TrainerError, match="TRN104"):
        bench(kl_loss_coef=0.1, ref_load=str(other))
