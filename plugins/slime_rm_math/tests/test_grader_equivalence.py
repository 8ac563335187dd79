"""Equal answers: pairs by category, beside math-verify alone and DAPO's rule; the exact path for plain numbers."""

import asyncio
import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
from math_verify import parse, verify

from slime_rm_math.graders import dapo, plain
from slime_rm_math.graders.answers import canonical, label_text, last_boxed
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.notation import latex

pytestmark = pytest.mark.unit
PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data" / "answer_pairs.jsonl").read_text().splitlines()]
CATEGORIES = {"notation", "fractions", "sets", "intervals", "units", "latex", "matrices", "percent", "text"}
MISREAD = {  # label, answer: equal, or not, in the eyes of a person, and read the other way
    ("10", "1010_2"),
    (r"\{1,2\}", "(1,2)"),
    (r"(-\infty,2)", "x<2"),
    ("7", "7 dollars"),
}
BY_TEXT = {  # right here for their text, which math-verify alone does not read
    ("5", "5."),
    (r"1\,000", "1000"),
    (r"\text{June 20}", "June 20"),
    (r"\text{A,B,D}", "A,B,D"),
    (r"\emptyset", r"\varnothing"),
}


def alone(label, answer):
    """What math-verify says by itself, in this process, without a clock."""
    boxes = ["\\boxed{" + text + "}" for text in (label, answer)]
    return verify(*(parse(box, parsing_timeout=None) for box in boxes), timeout_seconds=None)


@pytest.fixture(scope="module")
def outcomes():
    equal = Equivalence(workers=1, seconds=1.5, memory_mb=512)

    async def all_of_them():
        return [(await equal.verdict(pair["answer"], pair["label"])).outcome for pair in PAIRS]

    try:
        yield asyncio.run(all_of_them())
    finally:
        equal.close()


def test_there_are_three_hundred_pairs_of_every_category():
    assert len(PAIRS) >= 300
    counted = {category: sum(pair["category"] == category for pair in PAIRS) for category in CATEGORIES}
    assert min(counted.values()) >= 15
    assert sum(not pair["equal"] for pair in PAIRS) >= 80


def test_every_pair_is_judged_as_a_person_does_but_for_the_known_ones(outcomes):
    wrong = {
        (pair["label"], pair["answer"])
        for pair, outcome in zip(PAIRS, outcomes, strict=True)
        if (outcome == "right") != pair["equal"]
    }
    assert wrong == MISREAD


def test_every_pair_is_judged_as_by_math_verify_alone_but_for_equal_texts_and_what_it_cannot_read(outcomes):
    apart = {
        (pair["label"], pair["answer"])
        for pair, outcome in zip(PAIRS, outcomes, strict=True)
        if pair["category"] != "notation" and (outcome == "right") != alone(pair["label"], pair["answer"])
    }
    assert apart == BY_TEXT


def test_the_table_of_the_documentation_is_that_of_these_pairs(outcomes):
    hits = sum((outcome == "right") == pair["equal"] for pair, outcome in zip(PAIRS, outcomes, strict=True))
    equal = sum(pair["equal"] for pair in PAIRS)
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text(encoding="utf-8")
    assert f"| all | {len(PAIRS)} | {equal} | {hits} |" in page


def written(value, draw):
    """A number as somebody may write it; fractions and decimals that the exact path takes."""
    sign, size = "-" if value < 0 else "", abs(value)
    ways = [f"{value.numerator * k}/{value.denominator * k}" for k in (1, 3)]
    ways += [
        rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}",
        rf"\dfrac{{{value.numerator}}}{{{value.denominator}}}",
    ]
    if value.denominator == 1:
        ways += [str(value), f"{int(value):,}", f"{sign}0{size}", f"{value}.0", f"{value}.000000"]
    millionths = size * 10**6
    if millionths.denominator == 1 and size < 10**6:
        ways.append(f"{sign}{int(size)}.{int(millionths) % 10**6:06d}")
    return draw.choice(ways)


def test_the_exact_path_says_what_math_verify_says():
    draw, told = random.Random(9), 0
    for _ in range(300):
        value = Fraction(
            draw.randrange(-(10 ** draw.randint(1, 7)), 10 ** draw.randint(1, 7)),
            draw.choice((1, 1, 2, 7, 10, 1000, 10**6)),
        )
        other = value + draw.choice((0, 0, 1, -1, Fraction(1, 10**6), Fraction(1, 7)))
        label, answer = written(value, draw), written(other, draw)
        found = plain.compare(answer, label)
        if found is None:
            continue
        told += 1
        assert found == (value == other), (label, answer)
        assert found == alone(label, answer), (label, answer)
    assert told > 130


@pytest.mark.parametrize(
    ("label", "answer", "equal"),
    [
        ("1234", "1,234", True),
        ("7", "007", True),
        ("-0", "0", True),
        ("0.5", "0.500000", True),
        ("1/2", r"-\frac{-1}{2}", True),
        ("123456789012345", "123456789012346", False),
        ("0.000001", "0.000002", False),
        ("1/2", "0.5", None),  # math-verify rounds: it is asked
        ("0.3333333", "0.3333334", None),  # more than six places
        ("1/0", "1/0", None),
        ("1", "1,23", None),
        ("1", "٣", None),
        ("50%", "50", None),
        ("1e3", "1000", None),
        ("1" * 16, "1" * 16, None),
    ],
)
def test_plain_numbers_by_hand(label, answer, equal):
    assert plain.compare(answer, label) is equal


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{7} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{a \{ b} c}", r"a \{ b"),
        (r"\boxed{ 7 }", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{7", None),
        (r"$\boxed 7$", "7"),
        ("7", None),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{2", None),
    ],
)
def test_the_last_box_by_hand(text, box):
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\left( 1,\, 2 \right)", "(1,2)", True),
        ("two apples", "twoapples", False),
        ("1 1/2", "11/2", False),
        (r"\text{June  20}", "June 20", True),
        ("x^{12}", "x^{1}2", False),
        ("5.", "5", True),
        (r"\leftarrow", "arrow", False),
    ],
)
def test_equal_texts_by_hand(one, other, same):
    assert (canonical(one) == canonical(other)) is same


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("3½", r"3\frac{1}{2}"),
        ("-1 1/4", r"-1\frac{1}{4}"),
        ("x²", "x^{2}"),
        ("10⁻¹²", "10^{-12}"),
        ("2√3", r"2\sqrt{3}"),
        ("√{x}", r"\sqrt{x}"),
        ("∛(x+1)", r"\sqrt[3]{x+1}"),
        ("1.25E+03", r"1.25\cdot 10^{3}"),
        ("1 250 000", "1250000"),
        ("0.\\overline{36}", r"\frac{4}{11}"),
        ("2.1\\overline{6}", r"\frac{13}{6}"),
        ("−４２", "-42"),
        # what is none of these stays
        ("1 2", "1 2"),
        ("1, 2", "1, 2"),
        ("x^2 1/2", "x^2 1/2"),
        ("1 1/2/3", "1 1/2/3"),
        ("2e", "2e"),
        (r"\lbracex", r"\lbracex"),
        ("two apples", "two apples"),
    ],
)
def test_what_people_write_as_latex_by_hand(text, written):
    assert latex(text) == written


@pytest.mark.parametrize(("label", "text"), [(r"\boxed{7}", "7"), (7, "7"), ("  ", None), (None, None), ([7], None)])
def test_labels_by_hand(label, text):
    assert label_text(label) == text


@pytest.mark.parametrize(
    ("text", "form"),
    [  # worked by hand from Minerva's tables
        ("x = 1,000 dollars", "1000"),
        (r"$\frac12$", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"the \text{ cm} 5", "the5"),
        (r"45^\circ", "45"),
        (r"a \textbf{b}", "b"),
        (r"\boxed{12}", "12"),
        ("0.5 units", "0.5"),
    ],
)
def test_minervas_normal_form_by_hand(text, form):
    assert dapo.normal_form(text) == form


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [("34", "34", True), ("34.0", "34", False), ("34", "34.0", True), ("1,000", "1000", True), ("073", "73", False)],
)
def test_dapos_labels_are_whole_numbers(answer, label, right):
    assert dapo.is_right(answer, label) is right
