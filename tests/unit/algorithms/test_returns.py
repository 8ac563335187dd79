"""KL in the reward, returns and GAE over trainable tokens: by hand, against sums over what follows, and at the edges."""

import math

import numpy as np
import pytest
import ref_advantages
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.credit import discounts
from slime_core.algorithms.shared.kl import reward_kl
from slime_core.algorithms.shared.returns import gae, reward_to_go

pytestmark = pytest.mark.unit

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)


def mask_of(*bits):
    return np.array(bits, np.float32)


@pytest.mark.parametrize(
    ("kind", "want"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5), ("low_var_kl", math.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimators_by_hand(kind, want):
    np.testing.assert_allclose(reward_kl(np.array([-1.0]), np.array([-1.5]), kind), [want], rtol=1e-12)


def test_low_var_kl_is_bounded_where_k3_overflows():
    policy, reference = np.array([-900.0]), np.array([0.0])
    assert reward_kl(policy, reference, "low_var_kl").tolist() == [10.0]
    assert np.isinf(reward_kl(policy, reference, "k3")).all()


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    # d = -1e-8: k3 = d^2 / 2 - d^3 / 6 + ..., which exp(-d) - 1 + d would lose
    np.testing.assert_allclose(reward_kl(np.array([0.0]), np.array([1e-8]), "k3"), [5e-17], rtol=1e-3)


def test_another_kl_is_refused():
    with pytest.raises(ValueError, match="'k4'"):
        reward_kl(np.zeros(1), np.zeros(1), "k4")


def test_returns_by_hand_skip_masked_tokens():
    # trainable tokens 0 and 2 with rewards 1 and 4, gamma 1/2: G_2 = 4, G_0 = 1 + 4 / 2; the masked token is no step
    got = reward_to_go(np.array([1.0, 50.0, 4.0]), mask_of(1, 0, 1), np.zeros(3, int), 0.5)
    assert got.tolist() == [3.0, 0.0, 4.0]


def test_returns_stay_inside_their_sample():
    got = reward_to_go(np.array([1.0, 2.0, 4.0, 8.0]), np.ones(4, np.float32), np.array([0, 0, 2, 2]))
    assert got.tolist() == [3.0, 2.0, 12.0, 8.0]


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2, V = 2 9 4, token 1 masked, reward 10 at token 2:
    # delta_2 = 10 - 4 = 6, delta_0 = 4 / 2 - 2 = 0, A_2 = 6, A_0 = 0 + 6 / 4; returns A + V, and V where masked
    advantages, returns = gae(
        np.array([0.0, 0.0, 10.0]), np.array([2.0, 9.0, 4.0]), mask_of(1, 0, 1), np.zeros(3, int), 0.5, 0.5
    )
    assert advantages.tolist() == [1.5, 0.0, 6.0]
    assert returns.tolist() == [3.5, 9.0, 10.0]


def test_gae_ends_at_the_last_trainable_token():
    # the tokens of a tool that follow have values, and none of them enters
    advantages, _ = gae(np.array([1.0, 0, 0]), np.array([0.25, 7.0, 7.0]), mask_of(1, 0, 0), np.zeros(3, int))
    assert advantages.tolist() == [0.75, 0.0, 0.0]


def test_with_lambda_one_the_return_is_the_reward_to_go_and_with_zero_one_step():
    rng = np.random.default_rng(1)
    rewards, values, mask = rng.normal(size=6), rng.normal(size=6), np.ones(6, np.float32)
    sample = np.array([0, 0, 0, 1, 1, 1])
    _, returns = gae(rewards, values, mask, sample, 0.9, 1.0)
    np.testing.assert_allclose(returns, reward_to_go(rewards, mask, sample, 0.9), rtol=1e-12)
    advantages, _ = gae(rewards, values, mask, sample, 0.9, 0.0)
    after = np.where([1, 1, 0, 1, 1, 0], np.append(values[1:], 0), 0)
    np.testing.assert_allclose(advantages, rewards + 0.9 * after - values, rtol=1e-12)


def test_gae_over_turns_discounts_between_turns_only():
    # turns are tokens 0 1 and 3; V = 1 2 _ 4, reward 8 at 3, gamma 1/2, lambda 1/2 at the end of turn 0 only:
    # A_3 = 8 - 4 = 4; delta_1 = 4 / 2 - 2 = 0, A_1 = 0 + 4 / 4 = 1; delta_0 = 2 - 1 = 1, A_0 = 1 + 1 = 2
    mask, sample = mask_of(1, 1, 0, 1), np.zeros(4, int)
    half = discounts(mask, sample, 0.5, "turn")
    advantages, _ = gae(np.array([0, 0, 0, 8.0]), np.array([1.0, 2, 0, 4]), mask, sample, half, half)
    assert advantages.tolist() == [2.0, 1.0, 0.0, 4.0]


def test_nothing_to_train_is_all_zero():
    nothing = np.zeros(3, np.float32)
    assert reward_to_go(np.ones(3), nothing, np.zeros(3, int)).tolist() == [0.0] * 3
    advantages, returns = gae(np.ones(3), np.array([1.0, 2, 3]), nothing, np.zeros(3, int))
    assert advantages.tolist() == [0.0] * 3
    assert returns.tolist() == [1.0, 2.0, 3.0]
    empty = np.zeros(0)
    assert [a.shape for a in gae(empty, empty, np.zeros(0, np.float32), np.zeros(0, int))] == [(0,), (0,)]


def test_a_long_response_and_many_short_ones_together():
    lengths = [5000, *[3] * 200]
    sample = np.repeat(np.arange(201), lengths)
    rewards = np.zeros(len(sample))
    ends = np.cumsum(lengths) - 1
    rewards[ends] = 1.0
    got = reward_to_go(rewards, np.ones(len(sample), np.float32), sample, 0.999)
    np.testing.assert_allclose(got[0], 0.999**4999, rtol=1e-9)
    np.testing.assert_allclose(got[5000::3], 0.999**2, rtol=1e-12)


ROW = st.lists(st.tuples(st.integers(0, 1), st.floats(-3, 3), st.floats(-3, 3)), max_size=6)


@SETTINGS
@given(
    st.lists(ROW, max_size=4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.sampled_from(["token", "turn"]),
)
def test_any_step_equals_the_sums_of_the_reference(rows, gamma, lam, level):
    sample = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    mask = np.array([m for row in rows for m, _, _ in row], np.float32)
    rewards = np.array([r for row in rows for _, r, _ in row])
    values = np.array([v for row in rows for _, _, v in row])
    after, decay = discounts(mask, sample, gamma, level), discounts(mask, sample, lam, level)
    want, togo = [], []
    for row in rows:
        bits, r, v = [m for m, _, _ in row], [r for _, r, _ in row], [v for _, _, v in row]
        want += ref_advantages.gae(r, v, bits, gamma, lam, level)[0]
        togo += ref_advantages.rewards_to_go(r, bits, gamma, level)
    advantages, returns = gae(rewards, values, mask, sample, after, decay)
    np.testing.assert_allclose(advantages, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(returns, np.array(want) + values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(reward_to_go(rewards, mask, sample, after), togo, rtol=1e-9, atol=1e-12)
