"""Problems: what they say, how they are numbered, and that the two sides never meet."""

import numpy as np
import pytest

from slime_rm_math.problems import Problem, Problems, all_codes, decode, encode, held_out, mix

pytestmark = pytest.mark.unit

BOTH = ("+", "-")


def rows(side="train", *, digits=2, operations=BOTH, heldout=0.1, split_seed=0, limit=None):
    return Problems(
        digits=digits, operations=operations, heldout=heldout, split_seed=split_seed, side=side, limit=limit
    )


def problems(source):
    return [source.problem(position) for position in range(len(source))]


@pytest.mark.parametrize(
    ("problem", "text", "answer"),
    [
        (Problem(12, "+", 30), "12+30=", "42"),
        (Problem(12, "-", 30), "12-30=", "-18"),
        (Problem(7, "-", 7), "7-7=", "0"),
        (Problem(99, "+", 99), "99+99=", "198"),
    ],
    ids=["sum", "negative", "zero", "largest"],
)
def test_a_problem_says_what_it_asks_and_knows_its_answer(problem, text, answer):
    assert (problem.text, problem.answer) == (text, answer)
    assert decode(encode(problem)) == problem


def test_every_problem_is_on_exactly_one_side():
    train, heldout = problems(rows("train")), problems(rows("heldout"))
    assert len(train) + len(heldout) == 2 * 100 * 100
    assert len({*train, *heldout}) == 2 * 100 * 100
    assert 0.08 < len(heldout) / 20_000 < 0.12


def test_a_problem_and_its_mirror_are_on_the_same_side():
    train = set(problems(rows("train")))
    assert all(Problem(p.b, p.op, p.a) in train for p in train)


def test_both_operations_are_held_out_independently():
    heldout = set(problems(rows("heldout")))
    other = {Problem(p.a, "-" if p.op == "+" else "+", p.b) for p in heldout}
    assert 0 < len(heldout & other) < len(heldout) / 2


def test_rows_are_a_function_of_the_split_seed_and_lie_in_no_visible_order():
    first, again, other = rows(), rows(), rows(split_seed=1)
    assert problems(first)[:50] == problems(again)[:50] != problems(other)[:50]
    assert first.state() == again.state() != other.state()
    operands = [p.a for p in problems(first)[:200]]
    assert sum(a < b for a, b in zip(operands, operands[1:])) in range(70, 130)


def test_a_prompt_carries_its_label_and_position():
    prompt = rows().at(5)
    assert prompt.position == 5
    assert prompt.prompt == rows().problem(5).text
    assert prompt.label == rows().problem(5).answer


def test_the_limit_keeps_the_first_rows():
    assert problems(rows("heldout", limit=10)) == problems(rows("heldout"))[:10]


@pytest.mark.parametrize(("digits", "count"), [(1, 100), (2, 10_000), (3, 1_000_000)])
def test_operands_have_up_to_the_digits_asked_for(digits, count):
    codes = all_codes(digits, ("-",))
    assert len(codes) == len(np.unique(codes)) == count
    ends = [decode(int(code)) for code in (codes[0], codes[-1])]
    assert ends == [Problem(0, "-", 0), Problem(10**digits - 1, "-", 10**digits - 1)]


def test_the_hash_is_splitmix64():
    # First outputs of SplitMix64 from state 0, as published with the xoshiro generators.
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([0, golden], dtype=np.uint64)
    assert [hex(v) for v in mix(states, 0)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_the_held_out_share_is_the_share_asked_for():
    codes = all_codes(3, BOTH)
    assert held_out(codes, 0.25, 3).mean() == pytest.approx(0.25, abs=0.005)
