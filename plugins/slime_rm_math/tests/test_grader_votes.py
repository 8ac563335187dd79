"""What samples are counted as having answered: equal answers are one vote, and maj@k is worked by hand from them."""

import asyncio
import json
from pathlib import Path

import pytest

from slime_core import Context, Group, Prompt, Sample, Status
from slime_core.config.schema import Config
from slime_core.evaluation.questions import answer_of, questions_of
from slime_core.evaluation.statistics import figures_of
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.forms import at_once, of_number
from slime_rm_math.graders.registry import Graders
from slime_rm_math.options import Options
from slime_rm_math.plugin import slime_reward

pytestmark = pytest.mark.integration
PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data" / "answer_pairs.jsonl").read_text().splitlines()]
CLASSES = [  # each line is one answer, and no two lines are the same
    [
        "1/2",
        r"\frac{1}{2}",
        "0.5",
        r"\dfrac{1}{2}",
        r"50\%",
        "50%",
        r"x = \frac{1}{2}",
        "0.500",
        r"\frac{2}{4}",
        "$0.5$",
    ],
    ["1/3", "0.333333", r"\frac{3}{9}"],
    ["-3/4", r"-\frac{3}{4}", "-0.75", r"\frac{-3}{4}"],
    ["1,234", "1234", "1234.0", r"1\,234"],
    [r"\sqrt{8}", r"2\sqrt{2}", r"\frac{4}{\sqrt{2}}", "2.828427"],
    ["120", "5!", r"2^{7}-8"],
    [r"\frac{1}{3000000}"],
    [r"\frac{1}{4000000}"],
    ["x^2+2x+1", "(x+1)^2", "1+2x+x^2", r"\frac{(x+1)^3}{x+1}"],
    ["x^2+1"],
    [r"\{1,2\}", r"\{2,1\}", "1, 2", r"\{2, \frac{2}{2}\}", r"\{1\}\cup\{2\}"],
    ["(1,2)", r"\left(1, \frac{4}{2}\right)"],
    ["[1,2]"],
    [r"(-\infty,1]\cup[2,\infty)", r"[2,\infty)\cup(-\infty,1]"],
    ["x>2", "2<x", r"(2,\infty)"],
    [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1.0\\4/2\end{bmatrix}"],
    [r"\text{East}", "east", r"\mathrm{East}"],
    [r"\emptyset", r"\varnothing", r"\{\}"],
    [r"1<x\le 2", "(1,2]"],
    ["2x+3y=5", "5=3y+2x"],
    ["9" * 40],
    ["9" * 39 + "8"],
]


@pytest.fixture(scope="module")
def graders():
    made = Graders()
    yield made
    made.close()


def ctx(**options):
    return Context(config=Config(), options=Options(grader_workers=1, **options), evaluation=True)


def answered(graders, name, response, label, status=Status.COMPLETED, **options):
    sample = Sample(response=response, label=label, status=status)
    reward = asyncio.run(graders.grade(name, sample, ctx(**options)))
    return reward.value, sample.metadata["extracted_answer"]


def test_equal_answers_have_one_text_and_others_another():
    equal = Equivalence(workers=1, seconds=1.5, memory_mb=512)

    async def all_of_them():
        return [{await equal.form(text) for text in texts} for texts in CLASSES]

    try:
        found = asyncio.run(all_of_them())
    finally:
        equal.close()
    assert {texts[0]: forms for texts, forms in zip(CLASSES, found, strict=True) if len(forms) > 1} == {}
    assert len(set.union(*found)) == len(CLASSES)


def test_the_pairs_of_the_graders_are_one_vote_where_a_person_calls_them_equal_and_never_where_not():
    equal = Equivalence(workers=1, seconds=1.5, memory_mb=512)

    async def all_of_them():
        return [(await equal.form(pair["label"])) == (await equal.form(pair["answer"])) for pair in PAIRS]

    try:
        same = asyncio.run(all_of_them())
    finally:
        equal.close()
    merged = [pair for pair, one in zip(PAIRS, same, strict=True) if one and not pair["equal"]]
    apart = [pair for pair, one in zip(PAIRS, same, strict=True) if not one and pair["equal"]]
    assert merged == []
    assert len(apart) == 10  # most of them percentages; the page on grading tells the number


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("0.50", "0.5"),
        (r"\frac{-1}{3}", "-0.333333"),
        ("1/3000000", "3.33333e-7"),
        (r"\text{ No Solution}", "no solution"),
        ("June 20", "june 20"),
    ],
)
def test_a_plain_answers_text_by_hand(text, form):
    assert at_once(text) == form


def test_numbers_are_told_apart_however_large():
    assert of_number(10**40 + 1) == str(10**40 + 1)  # an int is a rational
    assert of_number(7 * 10**400) == "7e400"


@pytest.mark.parametrize(
    ("name", "response", "label", "value", "answer"),
    [
        ("math", r"\boxed{\frac{1}{2}}", "0.5", 1, "0.5"),
        ("math", r"\boxed{7}", "0.5", 0, "7"),
        ("math", "0.5", "0.5", 0, ""),
        ("math", r"\boxed{9^{9^{9}}}", "2", 0, "9^{9^{9}}"),
        ("boxed_math", "0.5", "0.5", 0, ""),
        ("deepscaler", r"</think> \boxed{1/2}", r"\frac{1}{2}", 1, "0.5"),
        ("deepscaler", r"</think> \boxed{2/4}", r"\frac{1}{2}", 0, "2/4"),  # wrong, so no vote for what is right
        ("deepscaler", r"\boxed{1/2}", r"\frac{1}{2}", 0, ""),
        ("dapo", "Answer: $34$ dollars", "34", 1, "34"),
        ("dapo", "34", "34", -1, ""),
        ("gpqa", "A? No, the answer is (b)", "B", 1, "B"),
        ("gpqa", "no idea", "B", 0, ""),
        ("f1", "The  Cat!", "cat", 1, "cat"),
        ("exact_match", " 42\n", "42", 1, "42"),
        ("boxed_exact_match", r"so \boxed{ ab }", "ab", 1, "ab"),
    ],
)
def test_the_answer_of_every_rule_by_hand(graders, name, response, label, value, answer):
    assert answered(graders, name, response, label) == (value, answer)


def test_a_truncated_response_is_no_answer(graders):
    assert answered(graders, "exact_match", "42", "42", Status.TRUNCATED) == (0, "")


def test_the_answer_of_a_mix_is_that_of_its_heaviest_term(graders):
    for mix in ({"math": 1.0, "exact_match": 0.5}, {"exact_match": 0.5, "math": 1.0}):
        assert answered(graders, "mix", r"\boxed{1/2}", "0.5", mix=mix) == (1, "0.5")


def test_a_sample_that_the_grader_calls_silent_does_not_vote_by_its_text():
    assert answer_of(Sample(response="Answer: 7", metadata={"extracted_answer": ""})) is None
    assert answer_of(Sample(response="Answer: 7")) == "7"


def test_grading_adds_no_metadata_in_training(graders):
    sample = Sample(response=r"\boxed{7}", label="7", status=Status.COMPLETED)
    asyncio.run(graders.grade("math", sample, Context(config=Config(), options=Options())))
    assert sample.metadata == {}


def rewarded(texts, label, **options):
    samples = [Sample(id=f"eval/s/0-{n}", response=text, label=label) for n, text in enumerate(texts)]
    for number, sample in enumerate(samples, start=1):
        sample.status = Status.COMPLETED
        sample.append_response([1] * number, [-0.1] * number, text=sample.response)
    prompt = Prompt(id="eval/s/0", label=label, metadata={})
    group = Group(prompt=prompt, samples=samples, rollouts={n: [n] for n in range(len(samples))})
    config = Config(reward={"rm_type": "math"})
    context = Context(config=config, options=Options(grader_workers=1, **options), evaluation=True)
    rewards = asyncio.run(slime_reward(group, context))
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward.value
    return group


def test_the_majority_of_five_samples_by_hand():
    group = rewarded([r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{3}"], "0.5")
    (question,) = questions_of([group])
    assert question.answers == ["0.5", "0.5", "0.5", "3", "3"]
    found = figures_of([question], 1.0)
    # as texts 1/2, 0.5 and \frac12 would lose to 3, which two samples say; as one answer they win
    assert found["maj@5"] == 1.0
    # of 10 pairs 3 are right, 1 wrong, 6 undecided: 3 + 6/2
    assert found["maj@2"] == pytest.approx(0.6)
    # of 5 sets of four 2 hold 3 of the right and 1, and 3 hold two of each: 2 + 3/2
    assert found["maj@4"] == pytest.approx(0.7)


@pytest.mark.parametrize("mode", ["majority", "brevity"])
def test_group_rewards_are_of_training_and_leave_evaluations_as_they_are(mode):
    group = rewarded([r"\boxed{7}", r"\boxed{7} or so", r"\boxed{8}"], "8", group_reward=mode)
    assert [sample.reward for sample in group.samples] == [0.0, 0.0, 1.0]
