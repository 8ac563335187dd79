"""The gradient within the forward pass and log-probs first: the same loss, metrics and gradients, whatever the model."""

import dataclasses

import numpy as np
import pytest
import splits
import torch
import trainer_bench as made

from slime_core.errors import TrainerError
from slime_core.protocols import Loss
from slime_core.trainers.batch import prepared
from slime_core.trainers.fsdp.model import within_forward

pytestmark = pytest.mark.unit

LOCAL = {
    "clip": splits.SETTINGS["clip"],
    "tis": {"use_tis": True, "use_rs": True, "rs_level": "token", "eps_clip_c": 3.0},
    "cispo": {"advantage_estimator": "cispo"},
    "sft": {"loss_type": "sft_loss"},
}


def both(one, batch):
    """The step on each route."""
    worker = one.worker
    assert within_forward(worker.policy, worker.loss, worker.stage.train)
    other = dataclasses.replace(worker.loss, local=None)
    assert not within_forward(worker.policy, other, worker.stage.train)
    return one.thread.call(splits.step_of, worker, batch), one.thread.call(splits.step_of, worker, batch, other)


@pytest.mark.parametrize("case", LOCAL)
@pytest.mark.parametrize("tied", [False, True])
def test_both_routes_agree(bench, case, tied):
    batch = splits.with_roles(made.batch_of(temperature=0.8))
    error, where = splits.difference(*both(bench(tied=tied, max_tokens_per_gpu=50, **LOCAL[case]), batch))
    assert error < 2e-5, where


def test_both_routes_agree_in_bfloat16(bench):
    batch = splits.with_roles(made.batch_of())
    a, b = both(bench(dtype="bfloat16", max_tokens_per_gpu=50), batch)
    assert a[0]["loss"] == pytest.approx(b[0]["loss"], abs=1e-3)
    error, where = splits.difference(a, b)
    assert error < 0.03, where


def test_a_pack_of_masked_tokens_alone_adds_nothing(bench):
    batch = splits.with_roles(made.batch_of())
    batch.loss_mask[: batch.response_offsets[1]] = 0
    error, where = splits.difference(*both(bench(max_tokens_per_gpu=1), batch))
    assert error < 2e-5, where


def test_losses_over_sequences_take_the_log_probs_route(bench):
    for case in ("gspo", "tis"):
        one = bench(**splits.SETTINGS[case])
        assert not within_forward(one.worker.policy, one.worker.loss, one.worker.stage.train)


def test_temperatures_stay_float32_in_bfloat16_compute(bench):
    """0.7 is 0.69921875 in bfloat16, which would move every log-prob."""
    one = bench(dtype="bfloat16")
    seen = []
    policy, own = one.worker.policy, one.worker.policy.forward

    def watched(tokens, position_ids, segments, rows, *more, **options):
        seen.append(rows.temperature)
        return own(tokens, position_ids, segments, rows, *more, **options)

    policy.forward = watched
    one.call("score", made.batch_of(temperature=0.7), frozenset({"policy"}))
    assert {t.dtype for t in seen} == {torch.float32}
    assert all((t == np.float32(0.7)).all() for t in seen)


def test_every_loss_gets_the_mask_and_a_number_a_sequence(bench):
    seen = []

    def fn(log_probs, entropy, columns, train):
        seen.append((columns["loss_mask"], columns["sample"]))
        return -log_probs, {}

    one, batch = bench(max_tokens_per_gpu=60), made.batch_of()
    one.thread.call(splits.step_of, one.worker, batch, Loss(name="mine", fn=fn))
    lengths = [length for _, sample in seen for length in torch.bincount(sample).tolist()]
    assert sorted(lengths) == sorted(batch.response_lengths.tolist())
    assert sum(float(mask.sum()) for mask, _ in seen) == batch.loss_mask.sum()
    assert {sample.dtype for _, sample in seen} == {torch.int64}


def loss_with(prepare):
    return Loss(name="mine", fn=lambda log_probs, entropy, columns, train: (-log_probs, {}), prepare=prepare)


def test_prepare_sees_each_optimizer_step_once_and_its_columns_return_to_their_rows(bench):
    one, batch, seen = bench(num_steps_per_rollout=3), made.batch_of(), []

    def prepare(columns, train):
        seen.append(columns)
        return {"mean": np.full(len(columns["sample"]), columns["advantages"].mean()), "own": columns["sample"] * 2}

    got = prepared(batch, loss_with(prepare), one.config.train)
    assert len(seen) == 3
    assert sum(len(columns["loss_mask"]) for columns in seen) == len(batch.loss_mask)
    assert (got.columns["own"] == batch.sample_of_token() * 2).all()
    for columns in seen:
        mine = np.isin(batch.sample_of_token(), columns["sample"])
        np.testing.assert_allclose(got.columns["mean"][mine], batch.columns["advantages"][mine].mean(), rtol=1e-6)
    assert "mean" not in batch.columns


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (lambda c: None, "TRN102", "NoneType"),
        (lambda c: {"x": np.zeros(1)}, "TRN102", "shape"),
        (lambda c: {"x": np.full(len(c["sample"]), np.nan)}, "TRN95", "finite"),
        (lambda c: {"loss_mask": c["loss_mask"]}, "TRN102", "already"),
        (lambda c: {"x": np.array(["a"] * len(c["sample"]))}, "TRN95", "finite"),
        (lambda c: {f"x{c['sample'][0]}": np.zeros(len(c["sample"]))}, "TRN102", "before"),
    ],
)
def test_a_wrong_answer_of_prepare_is_refused(bench, answer, code, says):
    one = bench(num_steps_per_rollout=2)
    with pytest.raises(TrainerError, match=says) as caught:
        prepared(made.batch_of(), loss_with(lambda columns, train: answer(columns)), one.config.train)
    assert caught.value.code == code
