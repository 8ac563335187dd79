"""Weights, rejections, vetoes and off-policy masks by hand, against the reference, and where they have no meaning."""

import math

import pytest
import ref_losses as ref
import torch
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.corrections import (
    LEVELS,
    MODES,
    at_level,
    engine_gap,
    importance_weights,
    mean_weight,
    mismatch,
    off_policy,
    rejected,
    vetoed,
)

pytestmark = pytest.mark.unit

NAN = float("nan")


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def n(*values):
    return torch.tensor(values, dtype=torch.int64)


# one sequence of ratios 4, 1/2 and a masked 100; another of 1
GAP, MASK, SAMPLE = t(math.log(4), math.log(1 / 2), math.log(100), 0.0), t(1, 1, 0, 1), n(8, 8, 8, 3)


@pytest.mark.parametrize(
    ("level", "want"),
    [("token", [4, 0.5, 1, 1]), ("sequence", [2, 2, 1, 1]), ("geometric", [2**0.5, 2**0.5, 1, 1])],
)
def test_ratios_of_a_token_a_sequence_and_its_geometric_mean(level, want):
    gap = torch.where(MASK > 0, GAP, 0)
    torch.testing.assert_close(at_level(gap, MASK, SAMPLE, level).exp(), t(*want))


@pytest.mark.parametrize(
    ("mode", "want", "clipped"),
    [
        ("truncate", [2, 0.5, 1, 1], [1, 0, 0, 0]),
        ("clip", [2, 0.8, 1, 1], [1, 1, 0, 0]),
        ("mask", [0, 0, 1, 1], [1, 1, 0, 0]),
    ],
)
def test_modes_cut_above_cut_on_both_sides_or_drop(mode, want, clipped):
    found = importance_weights(GAP, MASK, SAMPLE, mode=mode, lower=0.8, upper=2.0)
    torch.testing.assert_close(found.value, t(*want))
    assert found.clipped.tolist() == [bool(c) for c in clipped]


def test_weights_at_a_bound_are_kept():
    assert importance_weights(t(0.0), t(1), None, mode="mask", lower=1.0, upper=1.0).value.tolist() == [1.0]


def test_a_ratio_beyond_the_range_of_exp_is_cut_and_counted():
    gap = torch.tensor([500.0, -500.0, 0.0])
    found = importance_weights(gap, torch.ones(3), None, upper=1e30)
    assert found.overflow.tolist() == [True, False, False]
    assert found.value.tolist() == pytest.approx([math.exp(20), 0.0, 1.0], rel=1e-5)


@pytest.mark.parametrize(
    ("level", "lower", "want"),
    [
        ("token", 0.0, [1, 0, 0, 0]),  # 4 is above 2; 1/2 is the lower bound, and kept
        ("token", 0.6, [1, 1, 0, 0]),
        ("sequence", 0.0, [0, 0, 0, 0]),
        ("geometric", 0.0, [0, 0, 0, 0]),
    ],
)
def test_rejection_drops_what_is_out_of_bounds_and_a_lower_bound_of_0_is_the_inverse(level, lower, want):
    assert rejected(GAP, MASK, SAMPLE, level=level, lower=lower, upper=2.0).tolist() == [bool(w) for w in want]


def test_a_sequence_is_rejected_as_a_whole_but_for_its_masked_tokens():
    assert rejected(GAP, MASK, SAMPLE, level="sequence", upper=1.9).tolist() == [True, True, False, False]


def test_a_veto_takes_the_whole_sequence_for_one_token():
    assert vetoed(GAP, MASK, SAMPLE, 0.6).tolist() == [True, True, False, False]
    assert vetoed(GAP, MASK, SAMPLE, 0.4).tolist() == [False] * 4


def test_a_masked_token_vetoes_nothing():
    assert vetoed(t(-50.0, 0.0), t(0, 1), n(0, 0), 0.5).tolist() == [False, False]


def test_off_policy_sequences_with_a_negative_advantage_are_dropped():
    new, old = t(-2.0, -1.0, -9.0, -1.0), t(-1.0, -1.0, 0.0, -1.0)  # means of old - new 0.5 and 0
    found = off_policy(new, old, t(-1.0, 1.0, -1.0, -1.0), MASK, SAMPLE, 0.4)
    assert found.tolist() == [True, False, False, False]
    assert not off_policy(new, old, t(-1.0, -1.0, -1.0, -1.0), MASK, SAMPLE, 0.5).any()


def test_weights_divided_by_their_mean_have_mean_one():
    weights = importance_weights(GAP, MASK, SAMPLE, upper=3.0).value  # 3, 1/2, (masked), 1
    assert mean_weight(weights, MASK) == 1.5
    assert (weights / 1.5)[MASK > 0].mean().item() == 1.0


@pytest.mark.parametrize(
    ("weights", "mask"), [(t(0.0, 0.0), t(1, 1)), (t(5.0), t(0)), (t(), t())], ids=["all_0", "masked", "empty"]
)
def test_a_mean_over_nothing_divides_by_one(weights, mask):
    assert mean_weight(weights, mask) == 1.0


def test_metrics_measure_the_gap_of_trainable_tokens():
    # trainer / engine 2: k3 of KL(engine || trainer) = 2 - 1 - log 2
    found = mismatch(t(math.log(2), NAN), t(0.0, 0.0), t(1, 0))
    torch.testing.assert_close(found["train_rollout_logprob_abs_diff"], t(math.log(2), 0.0))
    torch.testing.assert_close(found["mismatch_k3"], t(1 - math.log(2), 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_and_fully_masked_sequences_are_defined(level):
    for gap, mask, sample in ((t(), t(), n()), (engine_gap(t(NAN, 3.0), t(0, 0), t(0, 0)), t(0, 0), n(1, 1))):
        assert importance_weights(gap, mask, sample, level=level, upper=2.0).value.tolist() == [1.0] * len(gap)
        assert not rejected(gap, mask, sample, level=level, upper=2.0).any()
        assert not vetoed(gap, mask, sample, 0.5).any()
        assert not off_policy(gap, gap + 1, gap - 1, mask, sample, 0.1).any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: importance_weights(GAP, MASK, SAMPLE, level="turn", upper=2.0),
        lambda: importance_weights(GAP, MASK, SAMPLE, mode="bend", upper=2.0),
        lambda: importance_weights(GAP, MASK, SAMPLE, mode="clip", lower=3.0, upper=2.0),
        lambda: rejected(GAP, MASK, SAMPLE, lower=3.0, upper=2.0),
        lambda: rejected(GAP, MASK, None, level="sequence", upper=2.0),
    ],
    ids=["level", "mode", "weight bounds", "rejection bounds", "sequence"],
)
def test_bounds_and_modes_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=r"turn|bend|bounds|none|need the sequence"):
        wrong()


TOKENS = st.tuples(st.integers(0, 3), st.integers(0, 1), st.floats(-2, 2))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(TOKENS, max_size=12),
    st.sampled_from(LEVELS),
    st.sampled_from(MODES),
    st.sampled_from([0.0, 0.41, 0.83]),
    st.sampled_from([1.13, 2.7]),
)
def test_any_sequences_and_masks_equal_the_reference(rows, level, mode, lower, upper):
    gap, mask = t(*(row[2] for row in rows)), t(*(row[1] for row in rows))
    sample = n(*(row[0] for row in rows))
    gap = engine_gap(gap, torch.zeros_like(gap), mask)
    weights = importance_weights(gap, mask, sample, level=level, mode=mode, lower=lower, upper=upper)
    out = rejected(gap, mask, sample, level=level, lower=lower, upper=upper)
    veto = vetoed(gap, mask, sample, lower or 0.1)
    tokens = [ref.Token(row[1], 0.0, 0.0, 0.0, trainer=row[2], engine=0.0) for row in rows]
    step = [[token for token, row in zip(tokens, rows) if row[0] == s] for s in sorted({row[0] for row in rows})]
    sequences = {id(token): sequence for sequence in step for token in sequence}
    for i, token in enumerate(tokens):
        if not token.mask:
            assert (weights.value[i].item(), out[i].item(), veto[i].item()) == (1.0, False, False)
            continue
        own = sequences[id(token)]
        want = ref.weight(ref.gap_ratio(token, own, level), mode, lower, upper)
        assert weights.value[i].item() == pytest.approx(want)
        assert out[i].item() == ref.is_rejected(token, own, ref.Settings(rs=(level, lower, upper)))
        assert veto[i].item() == ref.is_rejected(token, own, ref.Settings(veto=lower or 0.1))
    want = ref.mean_weight(step, ref.Settings(tis=(level, mode, lower, upper)))
    assert mean_weight(weights.value, mask) == pytest.approx(want)
