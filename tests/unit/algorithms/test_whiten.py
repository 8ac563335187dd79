"""Whitening of a whole step: masked, two passes, and defined where there is nothing to divide by."""

import numpy as np
import pytest
import ref_advantages
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.returns import whiten

pytestmark = pytest.mark.unit


def test_only_trainable_tokens_count_and_masked_ones_are_zero():
    # 1 2 3 have mean 2 and variance 1
    got = whiten(np.array([1.0, 99.0, 2.0, 3.0]), np.array([1, 0, 1, 1], np.float32))
    np.testing.assert_allclose(got, np.array([-1, 0, 0, 1]) / np.sqrt(1 + 1e-8), atol=1e-7)
    assert got.dtype == np.float32


def test_a_step_with_nothing_to_train_is_zero():
    assert whiten(np.array([1.0, 2.0]), np.zeros(2, np.float32)).tolist() == [0.0, 0.0]
    assert whiten(np.zeros(0), np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6], ids=str)
def test_values_that_tie_and_a_single_token_are_exactly_zero(value):
    assert whiten(np.full(7, value), np.ones(7, np.float32)).tolist() == [0.0] * 7
    assert whiten(np.array([value, 5.0]), np.array([1, 0], np.float32)).tolist() == [0.0, 0.0]


def test_a_large_mean_does_not_cancel_the_variance():
    values = 1e6 + np.tile([0.0, 1.0], 500)
    got = whiten(values, np.ones(1000, np.float32)).astype(np.float64)
    np.testing.assert_allclose(abs(got), np.sqrt(999 / 1000), rtol=1e-6)
    in_float32 = values.astype(np.float32)
    one_pass = (in_float32**2).mean(dtype=np.float32) - in_float32.mean(dtype=np.float32) ** 2
    assert abs(one_pass - 0.25) > 1  # what a single pass in float32 makes of the same step


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.floats(-5, 5).map(lambda v: round(v, 3)), st.integers(0, 1)), max_size=30))
def test_any_step_equals_the_reference(rows):
    values, mask = [v for v, _ in rows], [m for _, m in rows]
    want = ref_advantages.whiten([values], [mask])[0]
    got = whiten(np.array(values), np.array(mask, np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(2, 40), st.integers(0, 9))
def test_order_does_not_matter(count, seed):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=count), rng.integers(0, 2, count).astype(np.float32)
    order = rng.permutation(count)
    np.testing.assert_allclose(whiten(values[order], mask[order]), whiten(values, mask)[order], atol=1e-6)
