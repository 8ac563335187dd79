"""Token weights worked by hand; denominators are those of the whole optimizer step."""

import numpy as np
import pytest
import ref_losses as ref
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.aggregate import MODES, token_weights

pytestmark = pytest.mark.unit


def weights(mask, rollout, rollouts, mode, divisor=1):
    return token_weights(np.array(mask, np.float32), np.array(rollout, np.int64), rollouts, mode, divisor)


def test_each_rollout_weighs_the_same_and_its_tokens_share_it():
    got = weights([1, 1, 1, 1, 0], [0, 1, 1, 1, 1], 2, "rollout_mean")
    np.testing.assert_allclose(got, [1 / 2, 1 / 6, 1 / 6, 1 / 6, 0])


def test_fan_out_siblings_share_their_rollouts_weight():
    # rollout 5 has two samples of 1 and 2 tokens: three tokens share 1 / 1
    np.testing.assert_allclose(weights([1, 1, 1], [5, 5, 5], 1, "rollout_mean"), [1 / 3] * 3)


def test_a_fully_masked_rollout_makes_no_other_heavier():
    np.testing.assert_allclose(weights([0, 0, 1], [0, 0, 1], 2, "rollout_mean"), [0, 0, 1 / 2])


def test_token_mean_counts_trainable_tokens_of_the_step():
    np.testing.assert_allclose(
        weights([1, 0, 1, 1, 1], [0, 0, 1, 1, 1], 2, "token_mean"), [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]
    )


def test_rollout_sum_lets_a_rollout_weigh_by_its_tokens():
    np.testing.assert_allclose(weights([1, 1, 1, 0], [0, 1, 1, 1], 2, "rollout_sum"), [1 / 2, 1 / 2, 1 / 2, 0])


def test_a_constant_divisor_knows_no_length():
    np.testing.assert_allclose(weights([1, 1, 1, 0], [0, 1, 1, 1], 2, "constant", 8), [1 / 16, 1 / 16, 1 / 16, 0])


TOKENS = st.lists(st.tuples(st.integers(0, 1), st.floats(-3, 3)), max_size=5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), TOKENS), min_size=1, max_size=6), st.sampled_from(MODES))
def test_any_rollouts_and_masks_equal_the_reference(sequences, mode):
    # a sequence may be empty, fully masked, or a fan-out sibling of another
    rollouts = [rollout for rollout, _ in sequences]
    of_token = [rollout for rollout, tokens in sequences for _ in tokens]
    masks, values = ([[token[k] for token in tokens] for _, tokens in sequences] for k in (0, 1))
    flat = [v for row in values for v in row]
    found = weights([m for row in masks for m in row], of_token, len(set(rollouts)), mode, 7)
    want = float(ref.aggregate(values, masks, rollouts, mode, 7))
    assert float((found.astype(np.float64) * flat).sum()) == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [[0, 0], []], ids=["masked", "empty"])
def test_nothing_trainable_gives_zeros_and_no_nan(mode, mask):
    assert weights(mask, [0] * len(mask), 1, mode).tolist() == [0.0] * len(mask)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="sequence_mean"):
        weights([1], [0], 1, "sequence_mean")
