"""Group statistics by id: worked by hand, and against the reference for shapes nobody would work by hand."""

import numpy as np
import pytest
import ref_advantages
import ref_grpo
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.dr_grpo import dr_grpo
from slime_core.algorithms.grpo import grpo
from slime_core.algorithms.pass_at_k import pass_at_k
from slime_core.algorithms.rloo import rloo
from slime_core.algorithms.sft import sft
from slime_core.algorithms.shared.groups import compare, means
from slime_core.algorithms.shared.kl import minus_reverse_kl

pytestmark = pytest.mark.unit


def arrays(reward, group, rollout=None, tokens=None):
    rollout = list(range(len(reward))) if rollout is None else rollout
    tokens = list(range(len(reward))) if tokens is None else tokens
    return np.array(reward, float), np.array(group, int), np.array(rollout, int), np.array(tokens, int)


def run(reward, group, rollout=None, *, std=True, tokens=None, std_scope="group"):
    return grpo(*arrays(reward, group, rollout, tokens), std=std, std_scope=std_scope)


EVERY = {
    "grpo": lambda *a: grpo(*a, std=True),
    "grpo_batch": lambda *a: grpo(*a, std=True, std_scope="batch"),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "pass_at_1": lambda *a: pass_at_k(*a, k=1),
}


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


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e9, -1e-7], ids=str)
def test_ties_are_exactly_zero(value, name):
    assert EVERY[name](*arrays([value] * 8, [0] * 7 + [1])).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", EVERY)
def test_a_group_of_one_teaches_nothing(name):
    assert EVERY[name](*arrays([5.0, 0.0, 1.0, 2.0], [0, 1, 1, 1]))[0] == 0.0


@pytest.mark.parametrize("name", EVERY)
def test_no_samples_at_all_give_no_advantages_at_all(name):
    assert EVERY[name](*arrays([], [])).shape == (0,)


@pytest.mark.parametrize("name", EVERY)
def test_answers_are_float32(name):
    assert EVERY[name](*arrays([0, 1], [0, 0])).dtype == np.float32


def test_fan_out_siblings_count_once():
    # rollouts 0: 4, 1: (1 + 1) / 2 = 1, 2: 1; mean (4 + 1 + 1) / 3 = 2
    np.testing.assert_array_equal(run([4, 1, 1, 1], [0] * 4, [0, 1, 1, 2], std=False), [2, -1, -1, -1])


def test_rollouts_that_tie_while_their_siblings_differ_are_never_divided_by_nothing():
    # rollout 0 has (0 + 2) / 2 = 1, rollout 1 has 1: there is no deviation between rollouts
    np.testing.assert_array_equal(run([0, 2, 1], [0] * 3, [0, 0, 1]), [-1, 1, 0])
    # 0.1 and 0.2 have a mean that is 0.15 but for the last bit
    np.testing.assert_allclose(run([0.1, 0.2, 0.15], [0] * 3, [0, 0, 1]), [-0.05, 0.05, 0], atol=1e-7)


def test_a_deviation_of_the_whole_batch_divides_every_group():
    # groups 0 0 1 1 with means 1 and 5; all rewards 0 2 4 6 have mean 3 and variance (9 + 1 + 1 + 9) / 3 = 20 / 3
    sigma = np.sqrt(20 / 3) + 1e-6
    got = run([0, 2, 4, 6], [0, 0, 1, 1], std_scope="batch")
    np.testing.assert_allclose(got, np.array([-1, 1, -1, 1]) / sigma, rtol=1e-6)


def test_a_scope_that_is_neither_group_nor_batch_is_refused():
    with pytest.raises(ValueError, match="'step'"):
        run([1, 2], [0, 0], std_scope="step")


def test_dr_grpo_only_centres():
    np.testing.assert_array_equal(dr_grpo(*arrays([1, 2, 6], [0, 0, 0])), [-2, -1, 3])


def test_rloo_leaves_its_own_reward_out_of_the_baseline():
    # others of 1: (2 + 6) / 2 = 4; of 2: 3.5; of 6: 1.5
    np.testing.assert_array_equal(rloo(*arrays([1, 2, 6], [0, 0, 0])), [-3, -1.5, 4.5])


def test_rloo_compares_siblings_with_other_rollouts_only():
    # rollout 0 holds 4 and 2; the others are 1 and 5, mean 3. Of 1: (3 + 5) / 2 = 4. Of 5: (3 + 1) / 2 = 2
    np.testing.assert_array_equal(rloo(*arrays([4, 2, 1, 5], [0] * 4, [0, 0, 1, 2])), [1, -1, -3, 3])


def test_rloo_keeps_small_differences_beside_a_large_offset():
    np.testing.assert_allclose(rloo(*arrays([1e8, 1e8 + 1], [0, 0])), [-1, 1], rtol=1e-6)


def best_of(reward, k, **more):
    reward, group, rollout, tokens = arrays(reward, [0] * len(reward), **more)
    return pass_at_k(reward, group, rollout, tokens, k=k)


def test_pass_at_k_by_hand():
    # n 4, k 2, one success: 3 of 6 pairs pass, R = 1/2, s = 1/2. Success: (1 - 1/2) / s = 1.
    # Failure: in 1 of its 3 pairs it meets the success: (1/3 - 1/2) / s = -1/3
    np.testing.assert_allclose(best_of([0, 1, 0, 0], 2), [-1 / 3, 1, -1 / 3, -1 / 3], rtol=1e-5)


def test_pass_at_k_is_zero_where_every_subset_passes():
    # 3 of 4 succeed: no pair fails
    assert best_of([1, 0, 1, 1], 2).tolist() == [0.0] * 4
    assert best_of([0.3, 0.1, 0.3, 0.3], 2).tolist() == [0.0] * 4


def test_pass_at_k_of_exactly_k_rollouts_is_zero():
    assert best_of([3, 1, 2], 3).tolist() == [0.0] * 3


def test_pass_at_one_is_grpo_with_the_population_deviation():
    # mean 2, variance (1 + 1 + 4) / 3 = 2
    np.testing.assert_allclose(best_of([1, 1, 4], 1), np.array([-1, -1, 2]) / np.sqrt(2), rtol=1e-5)


def test_pass_at_k_of_graded_rewards_by_hand():
    # pairs of 0 1 3: best 1 3 3, mean 7/3, deviation sqrt(8/9). With 0: (1 + 3) / 2; with 1: the same; with 3: 3
    want = (np.array([2, 2, 3]) - 7 / 3) / np.sqrt(8 / 9)
    np.testing.assert_allclose(best_of([0, 1, 3], 2), want, rtol=1e-5)


def test_pass_at_k_without_a_deviation_is_a_difference_of_means():
    reward, group, rollout, tokens = arrays([0, 1, 3], [0] * 3)
    got = pass_at_k(reward, group, rollout, tokens, k=2, std=False)
    np.testing.assert_allclose(got, [-1 / 3, -1 / 3, 2 / 3], rtol=1e-6)


def test_pass_at_k_siblings_share_their_rollouts_advantage():
    # rollouts 0: (0 + 2) / 2 = 1, 1: 0, 2: 0
    got = best_of([0, 2, 0, 0], 2, rollout=[0, 0, 1, 2])
    assert got[0] == got[1] > 0 > got[2] == got[3]


def test_pass_at_k_names_a_group_that_is_too_small():
    with pytest.raises(ValueError, match="group 7 has 2 rollouts, pass_k is 3"):
        pass_at_k(*arrays([1, 2, 3, 4, 5], [4, 4, 4, 7, 7]), k=3)


def test_pass_at_k_of_a_group_of_five_hundred_is_finite_and_centred():
    reward = np.random.default_rng(0).normal(size=500)
    got = best_of(reward, 64).astype(np.float64)
    assert np.isfinite(got).all()
    assert abs(got.mean()) < 1e-6


def test_distillation_is_minus_the_gap_of_log_probs_whatever_the_reward():
    got = minus_reverse_kl(np.array([-1.0, -3.0]), np.array([-2.0, -0.5]))
    assert got.tolist() == [-1.0, 2.5]
    assert got.dtype == np.float32


def test_means_are_exact_for_equal_values():
    value, place = np.array([0.1, 0.3, 0.1, 0.1, 0.3, 0.3]), np.array([0, 1, 0, 0, 1, 1])
    assert means(value, place).tolist() == [0.1, 0.3]


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


REWARD = st.sampled_from([0.0, 1.0, 0.1]) | st.floats(-10, 10).map(lambda v: round(v, 4))
ROWS = st.lists(st.tuples(REWARD, st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=16)
SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)


def columns(rows):
    return [r for r, _, _ in rows], [g for _, g, _ in rows], [10 * g + k for _, g, k in rows]


@SETTINGS
@given(ROWS, st.booleans())
def test_any_groups_equal_the_reference(rows, std):
    rewards, groups, rollouts = columns(rows)
    want = ref_grpo.advantages(rewards, groups, rollouts, std)
    np.testing.assert_allclose(run(rewards, groups, rollouts, std=std), want, rtol=1e-4, atol=1e-5)


@SETTINGS
@given(ROWS, st.booleans(), st.sampled_from(["none", "group", "batch"]))
def test_any_comparison_equals_the_reference(rows, others, std):
    rewards, groups, rollouts = columns(rows)
    want = ref_advantages.grouped(rewards, groups, rollouts, others=others, std=std)
    reward, group, rollout, _ = arrays(rewards, groups, rollouts)
    got = compare(reward, group, rollout, std=std, leave_one_out=others).of(reward)
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)


@SETTINGS
@given(ROWS, st.integers(0, 5), st.booleans())
def test_any_order_of_samples_and_any_names_give_the_same_advantages(rows, seed, std):
    reward, group, rollout, tokens = arrays(*columns(rows))
    order = np.random.default_rng(seed).permutation(len(rows))
    got = grpo(reward[order], 100 - group[order], rollout[order] * 7 + 3, tokens, std=std)
    np.testing.assert_allclose(got, grpo(reward, group, rollout, tokens, std=std)[order], rtol=1e-5, atol=1e-6)


@SETTINGS
@given(st.lists(REWARD, min_size=1, max_size=7), st.integers(1, 7), st.booleans(), st.booleans())
def test_pass_at_k_equals_the_enumeration_of_all_subsets(rewards, k, std, binary):
    rewards = [float(r > 0.5) for r in rewards] if binary else rewards
    k = min(k, len(rewards))
    reward, group, rollout, tokens = arrays(rewards, [0] * len(rewards))
    got = pass_at_k(reward, group, rollout, tokens, k=k, std=std)
    want = ref_advantages.pass_at_k(rewards, group.tolist(), rollout.tolist(), k, std)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    n, successes = len(rewards), int(sum(rewards))
    if binary and std and k <= n - successes and successes:
        passed, missed = ref_advantages.pass_at_k_binary(successes, n, k)
        np.testing.assert_allclose(got, [passed if r else missed for r in rewards], rtol=1e-5)


@SETTINGS
@given(st.lists(REWARD, min_size=2, max_size=9))
def test_rloo_is_dr_grpo_stretched(rewards):
    given_arrays = arrays(rewards, [0] * len(rewards))
    n = len(rewards)
    np.testing.assert_allclose(rloo(*given_arrays), dr_grpo(*given_arrays) * n / (n - 1), rtol=1e-4, atol=1e-6)
