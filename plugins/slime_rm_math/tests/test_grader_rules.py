"""Every rule by hand-worked responses: what is right, wrong, failed and unjudged, and what each is worth."""

import asyncio

import pytest

from slime_core import ConfigError, Context, Reward, Sample, Status
from slime_core.config.schema import Config
from slime_rm_math.graders import TYPES
from slime_rm_math.graders.choices import choice, f1
from slime_rm_math.graders.groups import brevity
from slime_rm_math.graders.mixture import mixed
from slime_rm_math.graders.registry import Graders
from slime_rm_math.options import Options

pytestmark = pytest.mark.unit


def graded(name, response, label, metadata=None, **options):
    """By a grader whose answers need no worker."""
    sample = Sample(response=response, label=label, metadata=metadata or {}, status=Status.COMPLETED)
    return asyncio.run(Graders().grade(name, sample, Context(config=Config(), options=Options(**options))))


CASES = [
    ("math", r"so \boxed{7}", "7", 1.0, "score"),
    ("math", r"so \boxed{8}", "7", 0.0, "score"),
    ("math", r"so \boxed{7}", r"\boxed{7.0}", 1.0, "score"),
    ("math", "so 7", "7", 0.0, "failed"),
    ("math", r"\boxed{}", "7", 0.0, "failed"),
    ("math", r"\boxed{9**99999999}", "7", 0.0, "failed"),
    ("math", r"\boxed{7}", None, 0.0, "infra_error"),
    ("math", r"\boxed{7}", "9**99999999", 0.0, "infra_error"),
    pytest.param("math", r"\boxed{7}", 10**5000, 0.0, "infra_error", id="a label of 5000 digits"),
    ("math", r"\boxed{7}", 7, 1.0, "score"),
    ("boxed_math", r"so \boxed{7}", "7", 1.0, "score"),
    ("boxed_math", "so 7", "7", 0.0, "failed"),
    ("dapo", "Answer: 34", "34", 1.0, "score"),
    ("dapo", "answer : 1,000 dollars", "1000", 1.0, "score"),
    ("dapo", "Answer: 35", "34", -1.0, "score"),
    ("dapo", "Answer: 34\nAnswer: 35", "34", -1.0, "score"),
    ("dapo", "34", "34", -1.0, "failed"),
    ("dapo", "Answer: 34" + " " * 300, "34", -1.0, "failed"),
    ("dapo", "Answer: 34", None, 0.0, "infra_error"),
    ("boxed_dapo", r"\boxed{x=34}", "34", 1.0, "score"),
    ("deepscaler", r"hm</think> \boxed{1/2}", r"\frac{1}{2}", 1.0, "score"),
    ("deepscaler", r"###Response \boxed{1,000 \text{ cm}^2}", "1000", 1.0, "score"),
    ("deepscaler", r"hm</think> \boxed{2/4}", r"\frac{1}{2}", 0.0, "score"),  # not reduced
    ("deepscaler", r"hm</think> \boxed{\sqrt{4}}", "2", 0.0, "score"),  # a whole number is asked for
    ("deepscaler", r"hm</think> \boxed{(1,2)}", "[1,2]", 0.0, "score"),
    ("deepscaler", r"hm</think> \boxed{(1,2,3)}", "(1,2)", 0.0, "score"),
    ("deepscaler", r"hm</think> \boxed{3\frac{1}{2}}", "3 1/2", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{12\,\mathrm{cm}}", "12", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{\$1{,}250}", "1250", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{1.25e3}", "1250", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{\mathbf{42}}", "42", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{\displaystyle {42} \quad}", "42", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{\textcolor{red}{42}}", "42", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{３}", "3", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{\mathbf{41}}", "42", 0.0, "score"),
    ("deepscaler", r"</think> \boxed{1\text{ and }2}", "1, 2", 1.0, "score"),
    ("deepscaler", r"</think> \boxed{1\text{ and }2}", "12", 0.0, "score"),
    ("deepscaler", r"</think> \boxed{1 or 2}", "12", 0.0, "score"),
    ("deepscaler", r"\boxed{7}", "7", 0.0, "failed"),
    ("deepscaler", r"\boxed{7} hm</think>", "7", 0.0, "failed"),
    ("gpqa", "The answer is (B).", "B", 1.0, "score"),
    ("gpqa", "A is correct", "B", 0.0, "score"),
    ("gpqa", "nothing", "B", 0.0, "failed"),
    ("gpqa", "The answer is not B.", "B", 0.0, "failed"),
    ("gpqa", "The answer isn't (B)", "B", 0.0, "failed"),
    ("gpqa", "It cannot be option B", "B", 0.0, "failed"),
    ("gpqa", "B is not the answer", "B", 0.0, "failed"),
    ("gpqa", "Option B is wrong.", "B", 0.0, "failed"),
    ("gpqa", "A, C and D are wrong, so B", "B", 1.0, "score"),
    ("gpqa", "It is A rather than B", "B", 0.0, "score"),
    ("gpqa", "neither A nor C: B", "B", 1.0, "score"),
    ("gpqa", "The answer is B, not A", "B", 1.0, "score"),
    ("gpqa", "A is not correct. The answer is (B).", "B", 1.0, "score"),
    ("gpqa", "I am not sure, but B", "B", 1.0, "score"),
    ("gpqa", "The answer is B", "", 0.0, "infra_error"),
    ("boxed_gpqa", r"not A, \boxed{\text{B}}", "B", 1.0, "score"),
    ("f1", "the cat sat", "a cat sat down", 0.8, "score"),
    ("f1", "yes it is", "yes", 0.0, "score"),
    ("exact_match", " 42\n", "42", 1.0, "score"),
    ("exact_match", "042", "42", 0.0, "score"),
    ("boxed_exact_match", r"so \boxed{ab}", "ab", 1.0, "score"),
]


@pytest.mark.parametrize(("name", "response", "label", "value", "kind"), CASES)
def test_a_rule_by_hand(name, response, label, value, kind):
    found = graded(name, response, label)
    assert (round(found.value, 12), found.kind) == (value, kind)
    assert bool(found.reason) == (kind != "score")


def test_f1_is_that_of_its_words():
    value, precision, recall = f1("The cat, the cat sat!", "A cat sat on it")
    assert (value, precision, recall) == (pytest.approx(4 / 7), pytest.approx(2 / 3), pytest.approx(2 / 4))


@pytest.mark.parametrize(
    ("response", "label", "metadata", "outcome"),
    [
        ("the answer is c", "C", {}, "right"),
        ("Answer: A. No, the answer is B", "B", {}, "right"),  # the last word counts
        ("<think>the answer is A</think> so B", "B", {}, "right"),
        ("The answer is B because option A is wrong", "B", {}, "right"),  # an option that is turned down is no answer
        ("Option A fails. The correct option is C, while option D repeats it.", "C", {}, "right"),
        ("Option A is wrong; option B is right", "B", {}, "right"),
        ("**Answer:** B\n\nPoint A lies outside.", "B", {}, "right"),
        (r"The answer is $\boxed{\text{(B)}}$, since A > C.", "B", {}, "right"),
        ("The answer is a prime, thus C", "C", {}, "right"),  # no letter, an article
        ("答案是B", "B", {}, "right"),
        ("b", "B", {}, "right"),
        ("(b).", "B", {}, "right"),
        ("B", "(B)", {}, "right"),
        ("C", "B.", {}, "wrong"),
        ("blue", "blue", {"choices": ["red", "blue"]}, "right"),
        ("red", "blue", {"choices": ["red", "blue"]}, "wrong"),
        ("B", 1, {"choices": ["red", "blue"]}, "right"),
        ("B", 7, {"choices": ["red", "blue"]}, "infra_error"),
        ("B", "red", {"choices": {"x": "red", "y": "blue"}, "correct_letter": "b"}, "right"),
        ("Q", "R", {"valid_letters": ["Q", "R"]}, "wrong"),
        ("D", "B", {"choices": ["red", "blue"]}, "unparsable"),  # there is no D
        ("B", "B", {"choices": 5}, "infra_error"),
        ("B", "B", {"valid_letters": "AB"}, "right"),
        ("B", "B", {"valid_letters": 2}, "infra_error"),
        pytest.param("B", 10**5000, {}, "infra_error", id="a label of 5000 digits"),
    ],
)
def test_choices_by_hand(response, label, metadata, outcome):
    assert choice(response, label, metadata).outcome == outcome


def test_an_unknown_type_names_the_row_that_asks_for_it_or_the_key():
    row = {"rm_type": "mathh", "row_id": "rows.jsonl:3"}
    with pytest.raises(ConfigError, match="no reward type 'mathh'") as error:
        graded("mathh", "7", "7", row)
    assert (error.value.where, error.value.fix) == ("metadata.rm_type of rows.jsonl:3", "did you mean 'math'?")
    with pytest.raises(ConfigError) as error:
        graded("boxed_mathh", "7", "7")
    assert error.value.where == "reward.rm_type"


def test_a_mix_is_the_weighed_sum_with_every_term():
    found = graded("mix", r"\boxed{8}", "7", mix={"math": 1.0, "format": 0.25})
    assert (found.value, found.terms, found.kind) == (0.25, {"math": 0.0, "format": 1.0}, "score")
    found = graded("mix", "8", "7", mix={"math": 1.0, "boxed_exact_match": 0.5})
    assert (found.value, found.kind) == (0.0, "failed")


def test_a_mix_is_not_judged_where_one_of_its_terms_is_not():
    rewards = {"math": Reward(value=1.0), "judge": Reward(value=0.0, kind="infra_error", reason="late")}
    found = mixed(rewards, {"math": 1.0, "judge": 0.1})
    assert (found.kind, found.reason) == ("infra_error", "judge: late")


@pytest.mark.parametrize("mix", [{"mix": 1.0}, {"math": float("nan")}, {"math": float("inf")}], ids=str)
def test_a_mix_that_means_nothing_is_refused(mix):
    with pytest.raises(ValueError, match="validation error"):
        Options(mix=mix)


def test_a_mix_of_an_unknown_type_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="'boxed_maths' is not a reward type of rm_math: did you mean 'boxed_math'"):
        Options(mix={"boxed_maths": 1.0})
    assert set(Graders()._grades) == set(TYPES)


def samples(*texts):
    found = [Sample(id=f"p/0-{n}", response=text, label="") for n, text in enumerate(texts)]
    for number, sample in enumerate(found, start=1):
        sample.append_response([1] * 10 * number, [-0.1] * 10 * number, text=sample.response)
    return found


def the_majority(*texts):
    graders = Graders()
    try:
        ctx = Context(config=Config(), options=Options(grader_workers=1))
        found = asyncio.run(graders.majority(samples(*texts), ctx))
    finally:
        graders.close()
    return [(reward.value, reward.kind) for reward in found]


def test_the_majority_is_the_label():
    seven = the_majority(r"\boxed{7}", r"\boxed{8}", r"\boxed{7.0}", "nothing")
    assert seven == [(1, "score"), (0, "score"), (1, "score"), (0, "failed")]
    assert the_majority(r"\boxed{8}", r"\boxed{7}") == [(1, "score"), (0, "score")]


def test_the_majority_counts_what_only_mathematics_calls_equal():
    boxes = [f"\\boxed{{{text}}}" for text in ("3", "3", r"\sqrt{8}", r"2\sqrt{2}", r"\frac{4}{\sqrt2}")]
    found = the_majority(*boxes)
    assert [value for value, _ in found] == [0, 0, 1, 1, 1]


def test_the_longest_right_answer_gets_half():
    rewards = [Reward(value=1.0), Reward(value=1.0), Reward(value=1.0), Reward(value=0.0)]
    assert [reward.value for reward in brevity(samples("a", "b", "c", "d"), rewards)] == [1.0, 0.75, 0.5, 0.0]
    assert [reward.value for reward in brevity(samples("a", "b"), [Reward(value=0.0), Reward(value=1.0)])] == [
        0.0,
        1.0,
    ]
