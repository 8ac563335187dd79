"""Problems: what they say, how they are numbered, and that the two sides never meet."""

import itertools

import numpy as np
import pytest

from slime_rm_math.problems import ArithmeticProblem, Kind, Problems, Style, all_codes, decode, encode, held_out, mix

pytestmark = pytest.mark.unit

WITH_NEGATIVE = Kind(negative=True)


def problems(kind=Kind(), side="train", **keys):  # noqa: B008
    source = Problems(kind, Style(), side=side, **keys)
    return [source.problem(position) for position in range(len(source))]


@pytest.mark.parametrize(
    ("problem", "text", "value"),
    [
        (ArithmeticProblem(12, "+", 30), "12+30=", 42),
        (ArithmeticProblem(12, "-", 30), "12-30=", -18),
        (ArithmeticProblem(7, "-", 7), "7-7=", 0),
        (ArithmeticProblem(99, "+", 99), "99+99=", 198),
    ],
    ids=["sum", "negative", "zero", "largest"],
)
def test_a_problem_says_what_it_asks_and_knows_its_value(problem, text, value):
    assert (Style().question(problem), problem.value) == (text, value)
    assert decode(encode(problem)) == problem


@pytest.mark.parametrize(
    ("value", "ones_first", "text"),
    [(42, False, "42"), (-18, False, "-18"), (42, True, "24"), (-18, True, "81-"), (130, True, "031"), (0, True, "0")],
)
def test_a_number_is_written_forwards_or_ones_first(value, ones_first, text):
    assert Style(ones_first=ones_first).answer(value) == text


def test_operands_may_be_padded():
    assert Style(padded=2).question(ArithmeticProblem(7, "+", 38)) == "07+38="
    assert Style(padded=3).question(ArithmeticProblem(999, "-", 0)) == "999-000="


def test_every_problem_is_on_exactly_one_side():
    train, heldout = problems(WITH_NEGATIVE), problems(WITH_NEGATIVE, "heldout")
    assert len(train) + len(heldout) == 2 * 100 * 100
    assert len({*train, *heldout}) == 2 * 100 * 100
    assert 0.08 < len(heldout) / 20_000 < 0.12


def test_a_problem_and_its_mirror_are_on_the_same_side():
    train = set(problems(WITH_NEGATIVE))
    assert all(ArithmeticProblem(p.b, p.op, p.a) in train for p in train)


def test_both_operations_are_held_out_independently():
    heldout = set(problems(WITH_NEGATIVE, "heldout"))
    other = {ArithmeticProblem(p.a, "-" if p.op == "+" else "+", p.b) for p in heldout}
    assert 0 < len(heldout & other) < len(heldout) / 2


def test_no_value_is_below_zero_unless_asked_for():
    kept = [*problems(), *problems(side="heldout")]
    assert len(kept) == 100 * 100 + 100 * 101 // 2
    assert min(p.value for p in kept) == 0
    assert min(p.value for p in problems(WITH_NEGATIVE)) < -90


def test_leaving_out_negatives_moves_no_problem_to_the_other_side():
    assert set(problems()) < set(problems(WITH_NEGATIVE))
    assert set(problems(side="heldout")) < set(problems(WITH_NEGATIVE, "heldout"))


def test_rows_are_a_function_of_the_split_seed_and_lie_in_no_visible_order():
    first, other = problems(), problems(Kind(split_seed=1))
    assert first[:50] == problems()[:50] != other[:50]
    operands = [p.a for p in first[:200]]
    assert sum(a < b for a, b in itertools.pairwise(operands)) in range(70, 130)


def test_the_state_names_everything_that_decides_the_rows():
    def state(kind=Kind(), style=Style(), **keys):  # noqa: B008
        return Problems(kind, style, **{"side": "train", **keys}).state()

    assert state() == state()
    changed = [
        state(Kind(digits=1)),
        state(Kind(operations=("+",))),
        state(WITH_NEGATIVE),
        state(Kind(heldout=0.2)),
        state(Kind(split_seed=1)),
        state(side="heldout"),
        state(style=Style(ones_first=True)),
        state(style=Style(padded=2)),
        state(limit=9),
    ]
    assert state() not in changed


def test_a_prompt_carries_its_label_and_position():
    source = Problems(Kind(), Style(ones_first=True), side="train")
    prompt, problem = source.at(5), source.problem(5)
    assert (prompt.position, prompt.prompt) == (5, Style().question(problem))
    assert prompt.label == str(problem.value)[::-1]


def test_the_limit_keeps_the_first_rows():
    assert problems(side="heldout", limit=10) == problems(side="heldout")[:10]


@pytest.mark.parametrize(("digits", "count"), [(1, 100), (2, 10_000), (3, 1_000_000)])
def test_operands_have_up_to_the_digits_asked_for(digits, count):
    codes = all_codes(Kind(digits=digits, operations=("+",)))
    assert len(codes) == len(np.unique(codes)) == count
    ends = [decode(int(code)) for code in (codes[0], codes[-1])]
    assert ends == [ArithmeticProblem(0, "+", 0), ArithmeticProblem(10**digits - 1, "+", 10**digits - 1)]


def test_the_hash_is_splitmix64():
    # The first two outputs of SplitMix64 from state 0, as published with the generator.
    states = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert [hex(v) for v in mix(states, 0)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_the_held_out_share_is_the_share_asked_for():
    codes = all_codes(Kind(digits=3))
    assert held_out(codes, 0.25, 3).mean() == pytest.approx(0.25, abs=0.005)
