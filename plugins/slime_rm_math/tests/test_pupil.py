"""The pupil: right without slips, wrong in the known way with them, and never about a held-out problem."""

import pytest

from slime_rm_math.problems import ArithmeticProblem, Kind, Problems, Style
from slime_rm_math.pupil import COPIES, Demonstrations, answer

pytestmark = pytest.mark.unit

NEVER, ALWAYS = [False] * 4, [True] * 4


def train(style=Style(), **keys):  # noqa: B008
    return Problems(Kind(**keys), style, side="train")


def demonstrations(carry_lost=0.65, seed=0, **style):
    return Demonstrations(train(Style(**style)), carry_lost=carry_lost, seed=seed)


@pytest.mark.parametrize(
    ("problem", "slips", "written"),
    [
        (ArithmeticProblem(47, "+", 38), ALWAYS, 75),  # the 1 from 7 + 8 is lost
        (ArithmeticProblem(47, "+", 31), ALWAYS, 78),  # nothing to carry
        (ArithmeticProblem(60, "+", 70), ALWAYS, 30),  # the hundred is lost
        (ArithmeticProblem(99, "+", 99), [True, False, False, False], 188),
        (ArithmeticProblem(99, "+", 99), [False, True, False, False], 98),
        (ArithmeticProblem(42, "-", 17), ALWAYS, 35),  # the borrowed ten is not paid back
        (ArithmeticProblem(48, "-", 17), ALWAYS, 31),
        (ArithmeticProblem(100, "-", 1), NEVER, 99),
        (ArithmeticProblem(17, "-", 42), NEVER, -25),
        (ArithmeticProblem(17, "-", 42), ALWAYS, -35),
    ],
)
def test_a_pupil_that_slips_loses_the_carry(problem, slips, written):
    assert answer(problem, slips) == written


@pytest.mark.parametrize("kind", [{"negative": True}, {"digits": 1}], ids=["two-digits", "one-digit"])
def test_without_slips_the_pupil_is_right(kind):
    rows = train(**kind)
    found = [rows.problem(position) for position in range(len(rows))]
    assert [p for p in found if answer(p, NEVER) != p.value] == []


def test_a_pupil_who_always_slips_is_right_in_four_cases_of_ten():
    rows = train()
    right = sum(answer(p, ALWAYS) == p.value for p in map(rows.problem, range(len(rows))))
    assert 0.38 < right / len(rows) < 0.42


def test_slips_come_as_often_as_asked_and_differ_between_copies():
    problems = train()
    once = [i for i in range(len(problems)) if _carries(problems.problem(i)) == 1]
    rows = demonstrations(0.65)
    wrong = [
        [int(rows.at(copy * len(problems) + i).label) != problems.problem(i).value for copy in range(COPIES)]
        for i in once[:300]
    ]
    assert sum(map(sum, wrong)) / (300 * COPIES) == pytest.approx(0.65, abs=0.03)
    assert sum(0 < sum(row) < COPIES for row in wrong) > 290


@pytest.mark.parametrize(("carry_lost", "right"), [(0.0, True), (1.0, False)])
def test_a_careful_pupil_and_a_hopeless_one(carry_lost, right):
    rows, problems = demonstrations(carry_lost), train()
    carrying = [i for i in range(2000) if _carries(problems.problem(i))]
    assert {rows.at(i).label == str(problems.problem(i).value) for i in carrying} == {right}


def test_demonstrations_are_rows_of_the_training_side_only():
    rows, problems = demonstrations(), train()
    assert len(rows) == COPIES * len(problems)
    assert [rows.at(i).prompt for i in range(50)] == [problems.at(i).prompt for i in range(50)]
    assert rows.at(len(problems) + 3).prompt == rows.at(3).prompt


def test_demonstrations_are_written_like_the_answers():
    plain, turned = demonstrations(), demonstrations(ones_first=True, padded=2)
    assert [turned.at(i).label for i in range(50)] == [plain.at(i).label[::-1] for i in range(50)]
    assert {len(turned.at(i).prompt) for i in range(50)} == {6}


def test_the_state_names_everything_that_decides_the_rows():
    states = [demonstrations(), demonstrations(0.5), demonstrations(seed=1), demonstrations(ones_first=True)]
    assert len({str(rows.state()) for rows in states}) == 4
    assert demonstrations().state() == demonstrations().state()


def _carries(problem):
    """How many carries or borrows the column method needs, from the digits alone."""
    large, small = sorted((problem.a, problem.b), reverse=True)
    count = carried = 0
    for unit in (1, 10, 100):
        top, bottom = large // unit % 10, small // unit % 10 + carried
        carried = int(top + bottom > 9) if problem.op == "+" else int(top < bottom)
        count += carried
    return count
