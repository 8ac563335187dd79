"""Group statistics by id: worked by hand, and against the reference for shapes nobody would work by hand."""

import numpy as np
import pytest
import ref_grpo
from hypothesis import given, strategies as st

from slime_core.algo.estimators import grpo, sft

pytestmark = pytest.mark.unit


def run(reward, group, rollout=None, *, std=True, tokens=None):
    rollout = list(range(len(reward))) if rollout is None else rollout
    tokens = list(range(len(reward))) if tokens is None else tokens
    return grpo(np.array(reward, float), np.array(group), np.array(rollout), np.array(tokens, int), std=std)


def test_rewards_are_centred_and_divided_by_the_sample_standard_deviation():
    # mean 2, deviations -1 0 1, variance (1 + 0 + 1) / 2 = 1
    np.testing.assert_allclose(run([1, 2, 3], [7, 7, 7]), [-1 / 1.000001, 0, 1 / 1.000001], rtol=1e-6)


def test_without_std_rewards_are_only_centred():
    np.testing.assert_array_equal(run([1, 2, 6], [0, 0, 0], std=False), [-2, -1, 3])


def test_groups_are_found_by_id_whatever_their_order_and_size():
    # group 9 holds samples 0, 2 and 4 (1, 3, 5); group 4 holds 1 and 3 (10, 20)
    got = run([1, 10, 3, 20, 5], [9, 4, 9, 4, 9], std=False)
    np.testing.assert_array_equal(got, [-2, -5, 0, 5, 2])


def test_a_group_of_one_is_centred_and_never_divided():
    assert run([5.0], [0]).tolist() == [0.0]


def test_a_group_of_one_rollout_with_two_samples_is_centred_and_never_divided():
    np.testing.assert_array_equal(run([1, 3], [0, 0], [4, 4]), [-1, 1])


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e9], ids=str)
def test_ties_are_exactly_zero(value):
    assert run([value] * 7, [0] * 7).tolist() == [0.0] * 7


def test_fan_out_siblings_count_once():
    # rollouts 0: 4, 1: (1 + 1) / 2 = 1, 2: 1; mean (4 + 1 + 1) / 3 = 2
    np.testing.assert_array_equal(run([4, 1, 1, 1], [0] * 4, [0, 1, 1, 2], std=False), [2, -1, -1, -1])


def test_every_token_gets_its_samples_advantage():
    np.testing.assert_array_equal(run([0, 2], [0, 0], std=False, tokens=[0, 0, 0, 1]), [-1, -1, -1, 1])


def test_a_large_common_offset_does_not_drown_the_differences():
    np.testing.assert_allclose(run([1e8, 1e8 + 1], [0, 0], std=False), [-0.5, 0.5], rtol=1e-6)


def test_a_rollout_in_two_groups_is_refused():
    with pytest.raises(ValueError, match="rollout 0 belongs to groups 1 and 2"):
        run([1, 2], [1, 2], [0, 0])


def test_no_samples_give_no_advantages():
    assert run([], []).shape == (0,)


def test_supervised_tokens_all_count_one():
    assert sft(np.array([0, 0, 1])).tolist() == [1.0, 1.0, 1.0]


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=16),
    st.booleans(),
)
def test_any_groups_equal_the_reference(rows, std):
    rewards = [r for r, _, _ in rows]
    groups = [g for _, g, _ in rows]
    rollouts = [10 * g + k for _, g, k in rows]
    want = ref_grpo.advantages(rewards, groups, rollouts, std)
    np.testing.assert_allclose(run(rewards, groups, rollouts, std=std), want, rtol=1e-4, atol=1e-5)
