"""A turn competes with the same turn of its group: by hand, ragged, by ids, and through the core's facade."""

import numpy as np
import pytest

from slime_core.config.schema import Config
from slime_core.types import Batch
from slime_kernelbench.dialogue.advantages import estimators, turn_advantages
from slime_kernelbench.dialogue.returns import padded

pytestmark = pytest.mark.unit

# three rollouts of group 7, one of group 9; rollout 0 ended after its first turn, rollout 2 alone reached turn 2
TOTAL = np.array([1.56, 0.5, 0.1, 1.0, 0.3, 0.7, 4.0])
GROUP = np.array([7, 7, 7, 7, 7, 7, 9])
ROLLOUT = np.array([0, 1, 2, 1, 2, 2, 3])
TURN = np.array([0, 0, 0, 1, 1, 2, 0])


def test_by_hand():
    found = turn_advantages(TOTAL, GROUP, ROLLOUT, TURN)
    assert found == pytest.approx([0.84, -0.22, -0.62, 0.35, -0.35, 0.0, 0.0])  # mean 0.72 at turn 0, 0.65 at turn 1


def test_leave_one_out_by_hand():
    found = turn_advantages(TOTAL, GROUP, ROLLOUT, TURN, leave_one_out=True)
    assert found == pytest.approx([1.56 - 0.3, 0.5 - 0.83, 0.1 - 1.03, 0.7, -0.7, 0.0, 0.0])


def test_the_deviation_is_the_turns_own():
    found = turn_advantages(TOTAL, GROUP, ROLLOUT, TURN, std="group")
    first = np.std([1.56, 0.5, 0.1], ddof=1) + 1e-6
    second = np.std([1.0, 0.3], ddof=1) + 1e-6
    assert found == pytest.approx([0.84 / first, -0.22 / first, -0.62 / first, 0.35 / second, -0.35 / second, 0, 0])


def test_a_lone_turn_has_nothing_to_be_compared_with():
    for options in ({}, {"leave_one_out": True}, {"std": "group"}):
        assert turn_advantages(TOTAL, GROUP, ROLLOUT, TURN, **options)[5] == 0


def test_with_padding_those_that_ended_before_are_compared_too():
    """Rollout 0 was right at once (reward 1 for ever): its returns would be 1.56, 1.4, 1."""
    known = {0: padded([1.0], length=3), 1: padded([0.1, 1.0], length=3)}
    assert known[0] == pytest.approx([1.56, 1.4, 1.0])
    found = turn_advantages(TOTAL, GROUP, ROLLOUT, TURN, padded=known)
    mean = (1.4 + 1.0 + 0.3) / 3
    assert found[3:5] == pytest.approx([1.0 - mean, 0.3 - mean])
    assert found[5] == pytest.approx(0.7 - (1.0 + 1.0 + 0.7) / 3)
    assert found[:3] == pytest.approx([0.84, -0.22, -0.62])


def test_the_order_of_samples_changes_nothing():
    order = np.random.default_rng(3).permutation(len(TOTAL))
    for options in ({}, {"leave_one_out": True}, {"std": "group"}):
        straight = turn_advantages(TOTAL, GROUP, ROLLOUT, TURN, **options)
        mixed = turn_advantages(TOTAL[order], GROUP[order], ROLLOUT[order], TURN[order], **options)
        assert mixed == pytest.approx(straight[order])


def test_a_tie_is_exactly_nothing():
    found = turn_advantages(np.full(7, 0.1 + 0.2), GROUP, ROLLOUT, TURN, std="group")
    assert (found == 0).all()


def batch(metadata):
    count = len(TOTAL)
    return Batch(
        version=0,
        sample_ids=[str(i) for i in range(count)],
        tasks=["kernelbench"] * count,
        group=GROUP,
        rollout=ROLLOUT,
        reward=TOTAL,
        tokens=np.zeros(3 * count, np.int32),
        offsets=np.arange(count + 1) * 3,
        loss_mask=np.ones(2 * count, np.float32),
        response_offsets=np.arange(count + 1) * 2,
        train_metadata=metadata,
    )


def test_the_registered_estimators_read_turns_from_the_samples():
    train = Config().train
    made = {estimator.name: estimator for estimator in estimators()}
    assert set(made) == {"turn_grpo", "turn_rloo"}
    turns = [{"kernelbench": {"turn": int(turn)}} for turn in TURN]
    found = made["turn_rloo"].fn(batch(turns), train)["advantages"]
    assert found == pytest.approx(np.repeat([1.26, -0.33, -0.93, 0.7, -0.7, 0.0, 0.0], 2), abs=1e-6)
    divided = made["turn_grpo"].fn(batch(turns), train)["advantages"]
    assert divided[0] == pytest.approx(0.84 / np.std([1.56, 0.5, 0.1], ddof=1), abs=1e-4)
    plain = train.model_copy(update={"disable_grpo_std_normalization": True})
    assert made["turn_grpo"].fn(batch(turns), plain)["advantages"][0] == pytest.approx(0.84, abs=1e-6)
    returns = [{"kernelbench": {**t["kernelbench"], "returns": [1.56, 1.4, 1.0]}} for t in turns[:1]] + turns[1:]
    assert made["turn_rloo"].fn(batch(returns), train)["advantages"][6] == pytest.approx(1.0 - (1.4 + 0.3) / 2)


def test_samples_of_other_tasks_are_a_first_turn():
    found = estimators()[1].fn(batch([{} for _ in TOTAL]), Config().train)["advantages"]
    assert found.shape == (14,)
