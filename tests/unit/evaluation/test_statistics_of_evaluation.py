"""Estimators against exact enumeration, intervals and tests against numbers worked by hand or by scipy-free sums."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from slime_cli.evaluation_differences import mcnemar, sign_flip
from slime_core.evaluation.statistics import (
    bootstrap_interval,
    majority_at_k,
    pass_at_k,
    share_interval,
    wilson,
)

pytestmark = pytest.mark.unit


def enumerated(samples, k, judge):
    """The mean of ``judge`` over every subset of k samples."""
    found = [judge(subset) for subset in combinations(samples, k)]
    return math.fsum(found) / len(found)


def majority(subset):
    """How right the most frequent answer is; None does not vote, equals share the win."""
    answers = [answer for answer, _ in subset if answer is not None]
    if not answers:
        return 0.0
    most = max(map(answers.count, answers))
    best = {answer for answer in answers if answers.count(answer) == most}
    right = dict(subset)
    return math.fsum(right[answer] for answer in best) / len(best)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for c, k in product(range(n + 1), range(1, n + 1)):
        samples = [i < c for i in range(n)]
        assert pass_at_k(n, c, k) == pytest.approx(enumerated(samples, k, any), abs=1e-15)


def test_pass_at_k_of_many_samples_neither_overflows_nor_rounds_away():
    assert pass_at_k(10_000, 1, 100) == 0.01
    assert pass_at_k(2000, 1999, 1) == 0.9995


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_outside_its_bounds_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"n = {n}"):
        pass_at_k(n, c, k)


def test_pass_at_k_of_drawn_samples_is_unbiased():
    p, n, k = 0.3, 6, 4
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = math.fsum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


@pytest.mark.parametrize(
    "answers",
    ["aab", "aabb", "abcd", "aaabbc", "aabbccd", "aaa", "b", "aab..", "....", "abb.c", "aabbbc."],
)
def test_majority_at_k_is_the_mean_over_all_subsets(answers):
    right = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0, None: 0.0}
    samples = [(None if name == "." else name, right[None if name == "." else name]) for name in answers]
    votes = [(answers.count(name), right[name]) for name in sorted(set(answers) - {"."})]
    for k in range(1, len(answers) + 1):
        found = majority_at_k(votes, k, silent=answers.count("."))
        assert found == pytest.approx(enumerated(samples, k, majority), abs=1e-14), k


def test_majority_by_hand():
    assert majority_at_k([(2, 1.0), (1, 0.0)], 2) == pytest.approx(2 / 3)
    assert majority_at_k([(2, 1.0), (1, 0.0)], 3) == 1.0
    with pytest.raises(ValueError, match="k from 1 to 3"):
        majority_at_k([(3, 1.0)], 4)


def test_wilsons_interval_by_hand():
    low, high = wilson(0.0, 10)
    assert (low, high) == (0.0, pytest.approx(1.959963984540054**2 / (10 + 1.959963984540054**2)))
    assert wilson(1.0, 10) == (pytest.approx(1 - high), 1.0)
    low, high = wilson(0.5, 4)  # both ends p solve (0.5 - p)^2 = z^2 p (1 - p) / 4
    for end in (low, high):
        assert (0.5 - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / 4)


def test_right_or_wrong_questions_get_plain_wilson():
    values = [1.0] * 30 + [0.0] * 10
    assert share_interval(values) == pytest.approx(wilson(0.75, 40))
    assert share_interval([1.0] * 8) == wilson(1.0, 8), "where all are alike it is no point"
    assert share_interval([0.0] * 8, most=16) == wilson(0.0, 8)


def test_samples_of_a_question_narrow_the_interval_by_what_they_tell():
    alike = share_interval([0.0] * 20 + [1.0] * 20, most=8)  # all samples of a question agree: 40 trials
    apart = share_interval([0.25, 0.75] * 20, most=8)  # variance 1/16 a question, a quarter of 1/4: 160 trials
    assert alike == pytest.approx(wilson(0.5, 40))
    assert apart == pytest.approx(wilson(0.5, 160))
    assert share_interval([0.5] * 40, most=8) == pytest.approx(wilson(0.5, 320)), "never more than the samples"


def test_wilsons_interval_covers_what_it_says():
    n, p = 30, 0.9
    inside = [k for k in range(n + 1) if wilson(k / n, n)[0] <= p <= wilson(k / n, n)[1]]
    covered = math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in inside)
    assert 0.93 < covered < 0.99


def test_the_bootstrap_is_near_the_normal_interval_and_always_the_same():
    values = [math.sin(i * i) for i in range(400)]
    low, high = bootstrap_interval(values)
    mean, error = np.mean(values), np.std(values) / 20
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([2.5] * 9) == (2.5, 2.5)


def test_mcnemar_by_hand():
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(1, 4) == 2 * (1 + 5) / 32
    assert (mcnemar(3, 3), mcnemar(0, 0)) == (1.0, 1.0)
    assert mcnemar(9, 31) == mcnemar(31, 9) == pytest.approx(6.8e-4, rel=0.02)


@pytest.mark.parametrize(("first", "second"), [(0, 5), (1, 4), (3, 3), (7, 12), (2, 18)])
def test_flipping_signs_of_ones_is_mcnemars_test(first, second):
    assert sign_flip([1.0] * first + [-1.0] * second + [0.0] * 50) == pytest.approx(mcnemar(first, second), abs=1e-12)


def test_flipped_signs_are_enumerated_and_beyond_twenty_drawn():
    data = [0.25, -0.5, 0.75, 1.0]
    flips = [sum(s * d for s, d in zip(signs, data, strict=True)) for signs in product((1, -1), repeat=4)]
    assert sign_flip(data) == sum(abs(total) >= 1.5 for total in flips) / 16
    assert sign_flip([1.0] * 9 + [-1.0] * 31) == pytest.approx(mcnemar(9, 31), abs=6e-4)
    assert sign_flip([0.5] * 60) == 1 / 20_001
    assert sign_flip([]) == 1.0
