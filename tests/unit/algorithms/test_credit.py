"""Turns, where rewards lie, and credit by turn and token: by hand, against the reference, and where nothing trains."""

from functools import partial

import numpy as np
import pytest
import ref_advantages
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.grpo import grpo
from slime_core.algorithms.shared.credit import discounts, group_credit, token_rewards, turn_of_token
from slime_core.algorithms.shared.groups import compare

pytestmark = pytest.mark.unit

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)


def flat(*masks):
    sample = np.repeat(np.arange(len(masks)), [len(mask) for mask in masks])
    return np.array([m for mask in masks for m in mask], np.float32), sample.astype(np.int64)


def test_a_turn_is_a_maximal_run_of_trainable_tokens():
    mask, sample = flat([1, 1, 0, 1], [0, 1, 0, 0, 1, 1], [], [0, 0])
    assert turn_of_token(mask, sample).tolist() == [0, 0, -1, 1, -1, 0, -1, -1, 1, 1, -1, -1]


def test_turns_of_neighbouring_samples_are_not_one():
    mask, sample = flat([1, 1], [1], [1])
    assert turn_of_token(mask, sample).tolist() == [0, 0, 0, 0]


def test_a_step_without_tokens_has_no_turns():
    assert turn_of_token(*flat()).shape == (0,)


def test_a_scalar_reward_lies_at_the_last_trainable_token():
    mask, sample = flat([1, 1, 0], [0], [], [1])
    assert token_rewards(np.array([2.0, 3, 4, 5]), mask, sample).tolist() == [0, 2, 0, 0, 5]


def test_siblings_have_their_own_terminal_rewards():
    mask, sample = flat([1, 1], [1])
    assert token_rewards(np.array([2.0, 3]), mask, sample).tolist() == [0, 2, 3]


def test_token_rewards_replace_the_scalar_and_those_of_masked_tokens_go_to_their_cause():
    # token 0 has no cause before it; the reward 4 of the masked token 2 goes to token 1
    mask, sample = flat([0, 1, 0, 1, 0], [1])
    got = token_rewards(np.array([9.0, 5]), mask, sample, by_token={0: [1, 2, 4, 8, 16]})
    assert got.tolist() == [0, 6, 0, 24, 0, 5]


def test_turn_rewards_lie_at_the_ends_of_their_turns():
    mask, sample = flat([1], [1, 1, 0, 1, 1, 0])
    assert token_rewards(np.array([7.0, 9]), mask, sample, by_turn={1: [1, 2]}).tolist() == [7, 0, 1, 0, 0, 2, 0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"by_token": {1: [1.0]}}, "sample 1 has 1 token rewards for 3 tokens"),
        ({"by_turn": {1: [1.0]}}, "sample 1 has 1 turn rewards for 2 turns"),
    ],
    ids=["token", "turn"],
)
def test_rewards_of_another_length_are_refused(more, words):
    mask, sample = flat([1], [1, 0, 1])
    with pytest.raises(ValueError, match=words):
        token_rewards(np.zeros(2), mask, sample, **more)


def test_a_sample_with_nothing_trainable_has_no_reward_at_any_token():
    mask, sample = flat([0, 0], [0])
    assert token_rewards(np.ones(2), mask, sample, by_token={0: [1, 2]}, by_turn={1: [3]}).tolist() == [0, 0, 0]


def test_discounts_count_tokens_or_ends_of_turns():
    mask, sample = flat([1, 1, 0, 1], [1])
    assert discounts(mask, sample, 0.5, "token").tolist() == [0.5] * 5
    assert discounts(mask, sample, 0.5, "turn").tolist() == [1, 0.5, 0.5, 0.5, 0.5]
    assert discounts(*flat([1], [1]), 0.5, "turn").tolist() == [0.5, 0.5]


def credit(rewards, total, masks, group, *, rollout=None, level, gamma=1.0, **how):
    mask, sample = flat(*masks)
    rollout = np.arange(len(masks)) if rollout is None else np.array(rollout)
    return group_credit(
        np.array(rewards, float),
        np.array(total, float),
        mask,
        np.array(group),
        rollout,
        sample,
        level=level,
        gamma=gamma,
        compare=partial(compare, **how),
    )


def test_turns_compete_with_the_same_turn_of_other_rollouts():
    # rewards a turn: (1, 4) and (3, 8), gamma 1/2. Turn 1: 4 and 8, baseline 6. Turn 0: 1 + 2 and 3 + 4, baseline 5
    masks = [[1, 1, 0, 1], [1, 0, 1, 1]]
    got = credit([0, 1, 0, 4, 3, 0, 0, 8], [5, 11], masks, [0, 0], level="turn", gamma=0.5)
    assert got.tolist() == [-2, -2, 0, -2, 2, 0, 2, 2]


def test_tokens_compete_with_the_mean_of_the_turns_of_other_rollouts():
    # reward-to-go of tokens: 3 2 and 6 1; turn means 2.5 and 3.5, baseline 3
    got = credit([1, 2, 5, 1], [3, 6], [[1, 1], [1, 1]], [0, 0], level="token")
    assert got.tolist() == [0, -1, 3, -2]


def test_a_turn_that_one_rollout_alone_has_teaches_nothing():
    got = credit([1, 0, 5, 3], [6, 3], [[1, 0, 1], [1]], [0, 0], level="turn", std="group")
    assert got[2] == 0
    assert got[0] == -got[3] != 0


def test_a_sample_with_nothing_trainable_counts_in_turn_zero():
    # baseline (1 + 5) / 2
    assert credit([1, 0, 0], [1, 5], [[1], [0, 0]], [0, 0], level="turn").tolist() == [-2, 0, 0]


def test_siblings_count_once_in_a_turn():
    # rollout 0 has 4 and 2, mean 3; rollout 1 has 1; baseline 2
    got = credit([4, 2, 1], [4, 2, 1], [[1], [1], [1]], [0, 0, 0], rollout=[0, 0, 1], level="turn")
    assert got.tolist() == [2, 0, -1]


@pytest.mark.parametrize("level", ["turn", "token"])
def test_equal_rewards_are_exactly_zero(level):
    masks = [[1, 1, 1], [1, 0, 1, 1], [1]]
    mask, sample = flat(*masks)
    rewards = token_rewards(np.full(3, 0.1), mask, sample)
    assert credit(rewards, [0.1] * 3, masks, [0] * 3, level=level, std="group").tolist() == [0.0] * len(mask)


def test_another_level_is_refused():
    with pytest.raises(ValueError, match="'trajectory'"):
        credit([1], [1], [[1]], [0], level="trajectory")


def test_a_step_without_tokens_has_no_credit():
    assert credit([], [1.0, 2.0], [[], []], [0, 0], level="turn").shape == (0,)


@SETTINGS
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.1, -2.5]), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=8
    ),
    st.sampled_from(["turn", "token"]),
    st.booleans(),
)
def test_one_turn_and_one_terminal_reward_are_the_trajectory(rows, level, std):
    reward = np.array([r for r, _, _ in rows])
    group = np.array([g for _, g, _ in rows])
    masks = [[1] * n for _, _, n in rows]
    mask, sample = flat(*masks)
    rewards = token_rewards(reward, mask, sample)
    got = credit(rewards, reward, masks, group, level=level, std="group" if std else "none")
    np.testing.assert_array_equal(got, grpo(reward, group, np.arange(len(rows)), sample, std=std))


SAMPLE = st.tuples(
    st.lists(st.integers(0, 1), max_size=7),
    st.integers(0, 1),
    st.integers(0, 2),
    st.sampled_from([0.0, 1.0, 0.5]),
    st.sampled_from(["reward", "by_token", "by_turn"]),
    st.integers(0, 99),
)


@SETTINGS
@given(
    st.lists(SAMPLE, min_size=1, max_size=7),
    st.sampled_from(["turn", "token"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
    st.sampled_from(["none", "group", "batch"]),
)
def test_any_step_equals_the_reference(rows, level, gamma, others, std):
    step, lists = [], {"by_token": {}, "by_turn": {}}
    for number, (bits, group, rollout, reward, kind, seed) in enumerate(rows):
        sample = {"mask": bits, "group": group, "rollout": 3 * group + rollout, "reward": reward}
        if kind != "reward":
            count = len(bits) if kind == "by_token" else max(ref_advantages.turns(bits), default=-1) + 1
            sample[kind] = np.random.default_rng(seed).integers(-2, 3, count).astype(float).tolist()
            lists[kind][number] = sample[kind]
        step.append(sample)
    mask, sample_of_token = flat(*[s["mask"] for s in step])
    rewards = token_rewards(np.array([s["reward"] for s in step]), mask, sample_of_token, **lists)
    assert rewards.tolist() == [r for s in step for r in ref_advantages.token_rewards(s)]
    totals = [ref_advantages.total_reward(s) for s in step]
    ids = [s["group"] for s in step], [s["rollout"] for s in step]
    masks = [s["mask"] for s in step]
    got = credit(
        rewards, totals, masks, ids[0], rollout=ids[1], level=level, gamma=gamma, std=std, leave_one_out=others
    )
    want = ref_advantages.group_credit(step, level, gamma, others=others, std=std)
    np.testing.assert_allclose(got, [v for row in want for v in row], rtol=1e-5, atol=1e-6)
