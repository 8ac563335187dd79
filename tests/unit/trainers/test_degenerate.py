"""Degenerate steps: each has a defined outcome, changes nothing where it is skipped, and is counted."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer_bench as made

from slime_core.errors import TrainerError
from slime_core.trainers.batch import make_batch, stamp_of
from slime_core.trainers.data_parallel import BatchSplit
from slime_core.trainers.optimizer_step import FILE, NonFiniteGuard, StepOutcome, summary
from slime_core.types import ArrayRef, Status
from slime_core.weights.flops import Flops

pytestmark = pytest.mark.unit
STORED = ArrayRef(segment="000001.seg", offset=0, dtype="float32", shape=(4, 12), crc32=0)


def state(one):
    """Everything that an optimizer step changes."""
    optimizer = one.worker.actor.optimizer
    moments = {f"1.{n}": t.clone() for n, t in optimizer.moment1.items()}
    moments |= {f"2.{n}": t.clone() for n, t in optimizer.moment2.items()}
    return one.parameters() | moments, optimizer.steps


def unchanged(one, before):
    tensors, steps = state(one)
    return steps == before[1] and all(torch.equal(before[0][n], t) for n, t in tensors.items())


def by_estimator(one, batch, rewards):
    """The batch with the advantages that the stage's estimator gives for these rewards."""
    batch.reward[:] = rewards
    del batch.columns["advantages"]
    return one.worker.plugins.advantage(batch, {}, one.config.train)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "gspo", "cispo", "rloo"])
def test_equal_rewards_skip_the_step_and_neither_momentum_nor_decay_moves_a_weight(bench, estimator):
    one, batch = bench(advantage_estimator=estimator, weight_decay=0.1, lr_warmup_iters=9), made.batch_of()
    one.call("step", batch)
    before = state(one)
    equal = by_estimator(one, batch, 0.3)
    assert not equal.columns["advantages"].any()
    metrics = one.call("step", equal)
    assert (metrics["skipped_steps"], metrics["skipped_steps/no_gradient"]) == (1.0, 1.0)
    assert (metrics["optimizer_steps"], metrics["grad_norm"]) == (0.0, 0.0)
    assert metrics["lr"] == one.worker.actor.rate == pytest.approx(1e-3 * 2 / 9)
    assert all(map(math.isfinite, metrics.values()))
    assert unchanged(one, before)


@pytest.mark.parametrize("term", [{"entropy_coef": 0.01}, {"kl_loss_coef": 0.1}])
def test_equal_rewards_still_train_what_kl_and_entropy_ask_for(bench, term):
    one, batch = bench(**term), made.batch_of()
    if "kl_loss_coef" in term:
        batch.columns["reference"] = batch.columns["rollout_log_probs"]
    metrics = one.call("step", by_estimator(one, batch, 1.0))
    assert metrics["optimizer_steps"] == 1.0
    assert metrics["skipped_steps"] == 0.0
    assert metrics["grad_norm"] > 0


def test_groups_of_one_teach_nothing_and_are_skipped(bench):
    one = bench()
    batch = made.batch_of(groups=3, rollouts=1, fan_out=False)
    before = state(one)
    metrics = one.call("step", by_estimator(one, batch, [0.0, 1.0, 5.0]))
    assert metrics["skipped_steps/no_gradient"] == 1.0
    assert unchanged(one, before)


def test_only_the_optimizer_step_without_a_gradient_is_skipped(bench):
    one, batch = bench(num_steps_per_rollout=3, lr_warmup_iters=10), made.batch_of(fan_out=False)
    batch.columns["policy"] = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    second = np.isin(batch.rollout, np.arange(4, 8))[batch.sample_of_token()]
    batch.columns["advantages"][second] = 0
    metrics = one.call("step", batch)
    assert (metrics["optimizer_steps"], metrics["skipped_steps"]) == (2.0, 1.0)
    assert metrics["lr"] == pytest.approx(1e-3 * 2 / 10)
    assert one.worker.actor.optimizer.steps == 2


def test_a_wholly_masked_step_is_counted_as_masked(bench):
    one, batch = bench(), made.batch_of()
    one.call("step", batch)
    before = state(one)
    batch.loss_mask[:] = 0
    metrics = one.call("step", batch)
    assert (metrics["skipped_steps"], metrics["skipped_steps/masked"]) == (1.0, 1.0)
    assert (metrics["optimizer_steps"], metrics["loss"], metrics["train_tokens"]) == (0.0, 0.0, 0.0)
    assert unchanged(one, before)


def with_empty(seed=0, everything=False):
    """Groups in which some responses, or all, have no token."""
    groups = made.groups_of(seed=seed)
    for group in groups:
        for k, sample in enumerate(group.samples):
            if everything or k == 2:
                sample.tokens = sample.tokens[: sample.prompt_length]
                sample.response_length, sample.loss_mask, sample.rollout_log_probs = 0, [], []
                sample.weight_versions, sample.status = [], Status.COMPLETED
    return groups


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean", "rollout_sum", "constant"])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_responses_without_a_token_add_nothing_to_the_gradient(bench, max_tokens, aggregation):
    one = bench(max_tokens_per_gpu=max_tokens, loss_aggregation=aggregation)
    batch = make_batch(0, "main", with_empty())
    batch.columns["advantages"] = np.ones(len(batch.loss_mask), np.float32)
    assert (batch.response_lengths == 0).sum() == 3
    full = [made.subset(g, [i for i, s in enumerate(g.samples) if s.response_length]) for g in with_empty()]
    without = make_batch(0, "main", full)
    without.columns["advantages"] = np.ones(len(without.loss_mask), np.float32)
    loss, grads = one.gradient(batch)
    want_loss, want = one.gradient(without)
    share = len(np.unique(without.rollout)) / len(np.unique(batch.rollout))  # empty rollouts count in the mean
    scale = 1.0 if aggregation == "token_mean" else share
    assert loss == pytest.approx(want_loss * scale, rel=1e-4)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, want[name] * scale, atol=2e-6, rtol=1e-4)


def test_a_step_of_empty_responses_alone_is_skipped_and_scores_to_nothing(bench):
    one = bench(advantage_estimator="ppo", kl_coef=0.1)
    batch = make_batch(0, "main", with_empty(everything=True))
    found = one.call("score", batch, frozenset({"policy", "reference", "values"}))
    assert {values.shape for columns in found.values() for values in columns.values()} == {(0,)}
    for name in ("advantages", "returns", "values"):
        batch.columns[name] = np.zeros(0, np.float32)
    before = state(one)
    assert one.call("step", batch)["skipped_steps/masked"] == 1.0
    assert unchanged(one, before)


@pytest.fixture
def tolerant(bench, tmp_path):
    """A trainer that skips two steps in a row which are not finite."""
    one = bench(max_nonfinite_steps=2, max_tokens_per_gpu=40, weight_decay=0.1)
    one.worker.guard.errors = tmp_path / "errors"
    return one


def broken(batch, row=5, value=np.nan):
    """The batch with one advantage that is not finite."""
    columns = {n: v.copy() for n, v in batch.columns.items()}
    columns["advantages"][batch.response_offsets[row]] = value
    return make_like(batch, columns)


def make_like(batch, columns):
    import dataclasses

    return dataclasses.replace(batch, columns=columns)


def test_steps_that_are_not_finite_are_skipped_counted_and_named_and_then_end_the_run(tolerant, tmp_path):
    one, batch = tolerant, made.batch_of()
    one.call("step", batch)
    before = state(one)
    for count, value in ((1, np.nan), (2, np.inf)):
        metrics = one.call("step", broken(batch, value=value))
        assert (metrics["skipped_steps"], metrics["skipped_steps/nonfinite"]) == (1.0, 1.0)
        assert all(map(math.isfinite, metrics.values()))
        assert one.worker.guard.in_a_row == count
        assert unchanged(one, before)
    with pytest.raises(TrainerError) as caught:
        one.call("step", broken(batch))
    assert caught.value.code == "TRN95"
    assert batch.sample_ids[5] in caught.value.what
    assert unchanged(one, before)
    rows = [json.loads(line) for line in (tmp_path / "errors" / FILE).read_text().splitlines()]
    assert [row["samples"] for row in rows] == [[batch.sample_ids[5]]] * 2
    assert [row["in_a_row"] for row in rows] == [1, 2]


def test_a_finite_step_in_between_starts_the_count_again(tolerant):
    batch = made.batch_of()
    for _ in range(3):
        tolerant.call("step", broken(batch))
        assert tolerant.call("step", batch)["optimizer_steps"] == 1.0
    assert tolerant.worker.actor.optimizer.steps == 3
    assert tolerant.worker.guard.in_a_row == 0


def test_the_step_after_a_skipped_one_is_the_step_without_it(bench):
    batch, (one, other) = made.batch_of(), (bench(max_nonfinite_steps=1), bench())
    one.call("step", broken(batch))
    assert one.call("step", batch) == other.call("step", batch)
    assert all(torch.equal(a, b) for a, b in zip(state(one)[0].values(), state(other)[0].values()))


def test_a_gradient_that_is_not_finite_is_skipped_too(tolerant, tmp_path):
    one, batch = tolerant, made.batch_of()
    before = state(one)
    huge = make_like(batch, batch.columns | {"advantages": np.full(len(batch.loss_mask), 3e38, np.float32)})
    assert one.call("step", huge)["skipped_steps/nonfinite"] == 1.0
    assert unchanged(one, before)
    assert (tmp_path / "errors" / FILE).exists()


def test_the_count_of_steps_in_a_row_is_saved(tolerant, tmp_path):
    batch = made.batch_of()
    tolerant.call("step", broken(batch))
    tolerant.call("save", tmp_path / "state")
    tolerant.call("begin", tolerant.config)
    assert tolerant.worker.guard.in_a_row == 0
    tolerant.call("restore", tmp_path / "state")
    assert tolerant.worker.guard.in_a_row == 1


def rank_batch_of(batch):
    return BatchSplit(flops=Flops(token=1.0, pair=0.0), max_tokens=100).partition(batch)[0]


def test_without_the_key_the_first_step_that_is_not_finite_ends_the_run():
    with pytest.raises(TrainerError, match="TRN95"):
        NonFiniteGuard().skip(rank_batch_of(made.batch_of()), [0], math.nan, 1.0)


def test_all_samples_are_written_where_only_the_gradient_is_not_finite(tmp_path):
    batch = made.batch_of()
    assert NonFiniteGuard(most=1, errors=tmp_path).skip(rank_batch_of(batch), [], 1.0, math.inf) == StepOutcome(
        "nonfinite"
    )
    (row,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert row["samples"] == batch.sample_ids
    assert row["grad_norm"] == "inf"


def test_an_importance_ratio_that_overflows_is_cut_and_counted(bench):
    one, batch = bench(), made.batch_of()
    batch.columns["policy"] = np.full(len(batch.loss_mask), -300.0, np.float32)
    metrics = one.call("step", batch)
    assert metrics["ratio_overflow"] > 0
    assert all(map(math.isfinite, metrics.values()))
    batch.columns["policy"] = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    assert one.call("step", batch)["ratio_overflow"] == 0.0


def test_the_figures_of_a_step_are_means_over_those_that_have_them():
    outcomes = [
        StepOutcome("made", {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1}),
        StepOutcome("masked"),
        StepOutcome("no_gradient", {"loss": 0.0, "grad_norm": 0.0, "lr": 0.2}),
    ]
    found = summary(outcomes, 7.0)
    assert (found["loss"], found["grad_norm"], found["lr"]) == (0.5, 1.0, 0.2)
    assert (found["optimizer_steps"], found["skipped_steps"]) == (1.0, 2.0)
    assert (found["skipped_steps/masked"], found["skipped_steps/no_gradient"]) == (1.0, 1.0)
    assert "skipped_steps/nonfinite" not in found
    assert found["train_tokens"] == 7.0


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.sample_ids.__setitem__(0, "other"),
        lambda b: b.columns.__setitem__("more", b.columns["advantages"]),
        lambda b: b.tokens.__setitem__(3, 9),
        lambda b: b.offsets.__setitem__(1, 7),
        lambda b: b.response_offsets.__setitem__(1, 3),
        lambda b: b.loss_mask.__setitem__(0, 0.5),
        lambda b: b.rollout.__setitem__(0, 5),
        lambda b: b.temperature.__setitem__(0, 0.5),
        lambda b: b.columns["advantages"].__setitem__(0, 1e-7),
        lambda b: b.multimodal[0]["pixel_values"].__setitem__((3, 2), 1e-7),
        lambda b: b.multimodal[0].__setitem__("image_grid_thw", np.array([[1, 2, 2]])),
        lambda b: b.multimodal.reverse(),
        lambda b: b.multimodal[1].__setitem__("pixel_values", replace(STORED, offset=64)),
    ],
)
def test_every_part_of_a_batch_that_ranks_share_is_in_its_checksum(change):
    one, other = made.batch_of(), made.batch_of()
    for batch in (one, other):
        pictures = [{"pixel_values": array} for array in (np.zeros((4, 12), np.float32), STORED)]
        batch.multimodal = [*pictures, *[None] * (len(batch) - 2)]
    assert stamp_of(one) == stamp_of(other)
    change(other)
    assert stamp_of(one) != stamp_of(other)
