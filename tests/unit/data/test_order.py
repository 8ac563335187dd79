"""Permutations and task draws: functions of their keys, checked against counting."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

from slime_core.data import source
from slime_core.data.source import SMALL, Permutation, pick
from slime_core.seeds import seed_of

pytestmark = pytest.mark.unit


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 300) | st.integers(SMALL - 2, SMALL + 50), key=st.integers(0, 2**64 - 1))
def test_every_row_stands_at_exactly_one_place(n, key):
    found = Permutation(n, key)
    assert sorted(found.at(i) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [4097, 8192, 16385])
def test_large_sets_are_permuted_without_a_table(n):
    found = Permutation(n, 7)
    assert found._table is None
    places = [found.at(i) for i in range(n)]
    assert sorted(places) == list(range(n))
    assert places != sorted(places)


def test_a_billion_rows_cost_nothing_until_they_are_asked_for():
    found = Permutation(10**9, 3)
    assert len({found.at(i) for i in range(1000)}) == 1000
    assert all(0 <= found.at(i) < 10**9 for i in (0, 10**9 - 1))


@pytest.mark.parametrize("n", [10, 5000], ids=["table", "network"])
def test_the_key_is_all_that_matters(n):
    one, same, other = (
        [Permutation(n, key).at(i) for i in range(10)] for key in (seed_of(1, "a"), seed_of(1, "a"), seed_of(1, "b"))
    )
    assert one == same != other


def test_the_order_of_a_seed_never_changes():
    """Written down once: a run that is resumed by a later version sees the same rows."""
    assert [Permutation(10, 42).at(i) for i in range(10)] == [2, 9, 5, 4, 8, 0, 6, 1, 7, 3]
    large = [2532, 4424, 3921, 918, 710, 4450, 1265, 1696, 2648, 2946]
    assert [Permutation(5000, 42).at(i) for i in range(10)] == large


def test_all_orders_of_a_small_set_are_equally_likely():
    draws = 6000
    counts = Counter(tuple(Permutation(3, seed_of(i)).at(j) for j in range(3)) for i in range(draws))
    assert set(counts) == set(permutations(range(3)))
    # each is binomial with mean 1000 and deviation 28.9
    assert all(abs(count - 1000) < 5 * 29 for count in counts.values()), counts


def test_the_network_spreads_rows_evenly_and_mixes_neighbours():
    n, bins = 40_000, 20
    found = Permutation(n, 99)
    firsts = Counter(found.at(i) * bins // n for i in range(n // 10))
    # 200 a bin, without replacement: the deviation is below 14
    assert all(abs(firsts[b] - 200) < 5 * 14 for b in range(bins)), firsts
    close = sum(abs(found.at(i) - found.at(i + 1)) < n // 100 for i in range(4000))
    # two independent rows lie so close with probability about 0.02: 80 of 4000, deviation 8.9
    assert abs(close - 80) < 5 * 9, close


def test_places_outside_are_errors():
    for n in (5, 5000):
        with pytest.raises(IndexError):
            Permutation(n, 0).at(n)
        with pytest.raises(IndexError):
            Permutation(n, 0).at(-1)
    with pytest.raises(ValueError, match="at least one row"):
        Permutation(0, 0)


def test_the_mixer_is_splitmix64s():
    """The first outputs of splitmix64 with seed 0, from Vigna's reference code."""
    golden = 0x9E3779B97F4A7C15
    assert [source._mix(golden * i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_tasks_are_drawn_by_their_weights():
    draws = 8000
    counts = Counter(pick([1.0, 2.0, 5.0], 7, position) for position in range(draws))
    for task, share in ((0, 1 / 8), (1, 2 / 8), (2, 5 / 8)):
        deviation = (draws * share * (1 - share)) ** 0.5
        assert abs(counts[task] - draws * share) < 5 * deviation, counts


def test_a_draw_depends_on_seed_and_position_alone():
    forward = [pick([1, 1], 3, p) for p in range(50)]
    assert [pick([1, 1], 3, p) for p in reversed(range(50))] == forward[::-1]
    assert [pick([1, 1], 4, p) for p in range(50)] != forward
    assert {pick([2.5], 3, p) for p in range(9)} == {0}
