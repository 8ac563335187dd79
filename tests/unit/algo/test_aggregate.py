"""Token weights worked by hand; denominators are those of the whole optimizer step."""

import numpy as np
import pytest

from slime_core.algo.aggregate import token_weights

pytestmark = pytest.mark.unit


def weights(mask, rollout, rollouts, mode):
    return token_weights(np.array(mask, np.float32), np.array(rollout), rollouts, mode)


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


@pytest.mark.parametrize("mode", ["rollout_mean", "token_mean"])
@pytest.mark.parametrize("mask", [[0, 0], []], ids=["masked", "empty"])
def test_nothing_trainable_gives_zeros_and_no_nan(mode, mask):
    assert weights(mask, [0] * len(mask), 1, mode).tolist() == [0.0] * len(mask)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="sequence_mean"):
        weights([1], [0], 1, "sequence_mean")
