"""Importance ratios by hand and against the reference, with their gradients."""

import math

import pytest
import ref_losses as ref
import torch
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.ratios import LEVELS, LOG_LIMIT, bounded_exp, importance_ratio, over_sequence

pytestmark = pytest.mark.unit

NAN, INF = float("nan"), float("inf")


def t(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_a_tokens_ratio_is_its_own():
    found = importance_ratio(t(-1.0, -2.0), t(-1.5, -2.0), t(1, 1), None, "token")
    torch.testing.assert_close(found.value, t(math.exp(0.5), 1.0))
    assert found.overflow.tolist() == [False, False]


def test_a_sequences_ratio_is_the_geometric_mean_of_its_trainable_tokens():
    # log-ratios 0.3, 0.1 and a masked 9.0: mean 0.2 at every token; the other sequence has -0.4 alone
    new, old = t(0.3, 9.0, -0.4, 0.1), t(0.0, 0.0, 0.0, 0.0)
    found = importance_ratio(new, old, t(1, 0, 1, 1), torch.tensor([7, 7, 2, 7]), "sequence")
    torch.testing.assert_close(found.value, t(math.exp(0.2), math.exp(0.2), math.exp(-0.4), math.exp(0.2)))


def test_a_sequences_gradient_flows_through_all_its_tokens_and_the_token_variants_through_one():
    for level, want in (("sequence", [0.5, 0.5]), ("sequence_token", [1.0, 0.0])):
        new = t(0.0, 0.0, grad=True)
        importance_ratio(new, t(0.0, 0.0), t(1, 1), torch.tensor([0, 0]), level).value[0].backward()
        assert new.grad.tolist() == want, level


@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_beyond_the_range_of_exp_is_cut_counted_and_has_no_gradient(level):
    for dtype in (torch.float32, torch.float64):
        new = torch.tensor([0.0, -1.0], dtype=dtype, requires_grad=True)
        old = torch.tensor([-5000.0, -1.0], dtype=dtype)
        found = importance_ratio(new, old, torch.ones(2), torch.tensor([0, 1]), level)
        found.value.sum().backward()
        assert found.value[0].item() == pytest.approx(math.exp(LOG_LIMIT), rel=1e-5)
        assert found.overflow.tolist() == [True, False]
        assert new.grad.tolist() == [0.0, 1.0]
        assert math.isfinite(found.value[0].item() ** 2)


def test_a_ratio_far_below_one_is_zero_and_counts_as_no_overflow():
    value, overflow = bounded_exp(torch.tensor([-1000.0]))
    assert (value.item(), overflow.item()) == (0.0, False)


def test_a_number_that_is_not_one_is_not_replaced():
    assert math.isnan(bounded_exp(torch.tensor([NAN]))[0].item())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF], ids=str)
def test_masked_tokens_change_nothing_whatever_they_hold(level, junk):
    sample = torch.tensor([0, 0, 0])
    found = []
    for filler in (0.0, junk):
        new = t(0.4, filler, 0.2, grad=True)
        value = importance_ratio(new, t(0.0, 0.0, 0.0), t(1, 0, 1), sample, level).value
        value[[0, 2]].sum().backward()
        found.append((value[[0, 2]].tolist(), new.grad.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("junk", [NAN, INF, 5000.0], ids=str)
def test_a_masked_tokens_own_ratio_is_one_and_never_overflows(junk):
    found = importance_ratio(t(junk), t(0.0), t(0), None, "token")
    assert (found.value.item(), found.log_ratio.item(), found.overflow.item()) == (1.0, 0.0, False)


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_give_no_ratios(level):
    assert importance_ratio(t(), t(), t(), torch.zeros(0, dtype=torch.int64), level).value.shape == (0,)


def test_a_fully_masked_sequence_has_ratio_one():
    found = importance_ratio(t(3.0, 5.0), t(0.0, 0.0), t(0, 0), torch.tensor([0, 0]), "sequence")
    assert found.value.tolist() == [1.0, 1.0]


def test_sums_and_means_over_sequences_leave_masked_tokens_out():
    values, mask, sample = t(1, 2, 4, 8), t(1, 0, 1, 1), torch.tensor([5, 5, 5, -3])
    assert over_sequence(values, mask, sample, mean=False).tolist() == [5, 5, 5, 8]
    assert over_sequence(values, mask, sample, mean=True).tolist() == [2.5, 2.5, 2.5, 8]


def test_a_long_sequences_mean_is_taken_in_float64():
    values = torch.full((100_000,), 0.1, dtype=torch.float32)
    found = over_sequence(values, torch.ones(100_000), torch.zeros(100_000, dtype=torch.int64), mean=True)
    assert found[0].item() == pytest.approx(float(values[0]), rel=1e-12)


def test_an_unknown_level_or_a_missing_sequence_number_is_refused():
    with pytest.raises(ValueError, match="paragraph"):
        importance_ratio(t(0.0), t(0.0), t(1), None, "paragraph")
    with pytest.raises(ValueError, match="sequence of each token"):
        importance_ratio(t(0.0), t(0.0), t(1), None, "sequence")


TOKENS = st.tuples(st.integers(0, 3), st.integers(0, 1), st.floats(-3, 0), st.floats(-3, 0))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.sampled_from(LEVELS))
def test_any_sequences_and_masks_equal_the_reference(rows, level):
    new = t(*(row[2] for row in rows), grad=True)
    theirs = t(*(row[2] for row in rows), grad=True)
    old, mask = t(*(row[3] for row in rows)), t(*(row[1] for row in rows))
    sample = torch.tensor([row[0] for row in rows])
    got = importance_ratio(new, old, mask, sample, level).value
    sequences = {}
    for i, row in enumerate(rows):
        sequences.setdefault(row[0], []).append(ref.Token(row[1], theirs[i], row[3], 0.0))
    order = {s: iter(tokens) for s, tokens in sequences.items()}
    total, want = 0.0, 0.0
    for i, row in enumerate(rows):
        token = next(order[row[0]])
        if row[1]:
            one = ref.ratio(token, sequences[row[0]], level)
            torch.testing.assert_close(got[i], one)
            total, want = total + (i + 1) * got[i], want + (i + 1) * one
    if any(row[1] for row in rows):
        (mine,) = torch.autograd.grad(total, new)
        (reference,) = torch.autograd.grad(want, theirs)
        torch.testing.assert_close(mine, reference)
