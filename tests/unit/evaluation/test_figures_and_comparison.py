"""Figures of a set, its record, and two records compared, against numbers worked by hand."""

import json
from dataclasses import replace

import pytest

from slime_cli.evaluation_differences import compare, mcnemar
from slime_cli.evaluation_records import find_records, read_record, trim_records
from slime_cli.evaluation_tables import difference_tables, figure_tables, to_markdown
from slime_core.errors import DataError
from slime_core.evaluation.questions import Question, answer_of, final_answer, key_of, questions_of
from slime_core.evaluation.record import Evaluation, write_record
from slime_core.evaluation.statistics import figures_of, wilson
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def asked(number, scores, answers=None, *, category="", label="x", name="s"):
    return Question(
        id=f"eval/{name}/{number}",
        key=key_of(label),
        category=category,
        scores=list(scores),
        answers=list(answers or [None] * len(scores)),
    )


def evaluation(questions, *, name="s", version=0, threshold=1.0):
    figures = figures_of(questions, threshold)
    return Evaluation(name=name, version=version, threshold=threshold, figures=figures, questions=list(questions))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1", None),
        ("so 3 + 4\n#### 7", "7"),
        ("Answer: 3\nno\nFinal answer: $12$.", "12"),
        ("**Answer:** 5", "5"),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_answer_of_a_response(text, want):
    assert final_answer(text) == want


def test_an_answer_that_the_reward_found_stands_before_the_text():
    sample = Sample(response=r"\boxed{1}", metadata={"extracted_answer": " 2  x ", "answer": "the label"})
    assert answer_of(sample) == "2 x"
    assert answer_of(Sample(response=r"\boxed{}", metadata={"answer": "the label"})) is None


def test_questions_follow_rollouts_and_not_samples():
    prompt = Prompt(id="eval/s/0", label={"b": 1, "a": 2}, metadata={"category": 7})
    samples = [Sample(reward=0.0), Sample(reward=1.0, response=r"\boxed{4}"), Sample(reward=None)]
    (found,) = questions_of([Group(prompt=prompt, samples=samples, rollouts={5: [0, 1], 6: [2]})])
    assert found == Question(
        id="eval/s/0", key=key_of({"a": 2, "b": 1}), category="7", scores=[1.0, None], answers=["4", None]
    )


def test_figures_by_hand():
    found = figures_of([asked(0, [1, 0, 0, 0]), asked(1, [1, 1, 1, 1]), asked(2, [0, 0, 0.5, 0])], 1.0)
    assert found["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert (found["pass@4/low"], found["pass@4/high"]) == pytest.approx(wilson(2 / 3, 3))
    assert not any(key.startswith("maj@") for key in found), "nobody answered"
    assert figures_of([asked(2, [0, 0, 0.5, 0])], 0.5)["pass@1"] == 0.25, "the threshold says what is right"


def test_majority_figures_by_hand():
    found = figures_of([asked(0, [1, 1, 0], ["a", "a", "b"]), asked(1, [1, 0, 0], ["a", "b", "b"])], 1.0)
    assert found["maj@3"] == 0.5
    assert found["maj@2"] == pytest.approx(((1 + 0.5 + 0.5) / 3 + (0.5 + 0.5 + 0) / 3) / 2)
    assert "maj@1" not in found


def test_a_question_that_was_judged_too_seldom_is_left_out_and_counted():
    found = figures_of([asked(0, [1, None]), asked(1, [0, 0]), asked(2, [None, None])], 1.0)
    assert (found["pass@1"], found["pass@1/questions"]) == (0.5, 2.0)
    assert (found["pass@2"], found["pass@2/questions"]) == (0.0, 1.0)
    assert figures_of([asked(0, [None])], 1.0) == {}


def test_categories_have_figures_of_their_own():
    questions = [asked(i, [i % 2], category=("number/theory", "algebra")[i > 3]) for i in range(6)]
    found = figures_of(questions, 1.0)
    assert found["category/number/theory/questions"] == 4.0
    assert found["category/number/theory/pass@1"] == found["category/algebra/pass@1"] == 0.5
    table = figure_tables({"s": found})[1]
    assert (table.title, table.columns) == ("categories of s", ["category", "questions", "pass@1"])
    assert [row[:2] for row in table.rows] == [["algebra", "2"], ["number/theory", "4"]]
    assert table.rows[1][2] == "0.5 [0.15, 0.85]"


def test_tables_fold_intervals_and_escape_pipes():
    (table,) = figure_tables({"a|b": {"pass@1": 0.5, "pass@1/low": 0.25, "pass@1/high": 0.75}, "c": {"samples": 8.0}})
    assert table.rows == [["pass@1", "0.5 [0.25, 0.75]", "-"], ["samples", "-", "8"]]
    assert "| figure | a\\|b | c |" in to_markdown(table)


def test_a_record_comes_back_and_the_newest_is_found(tmp_path):
    old, new = evaluation([asked(0, [1])], version=3), evaluation([asked(0, [None], ["ü"])], version=12)
    other = evaluation([asked(0, [0])], name="a-1", version=3)
    paths = [write_record(tmp_path, one) for one in (old, new, other)]
    assert [path.name for path in paths] == ["s-000003.json", "s-000012.json", "a-1-000003.json"]
    assert read_record(paths[1]) == new
    assert {r.name: r.version for r in find_records(tmp_path)} == {"s": 12, "a-1": 3}
    assert {r.name: r.version for r in find_records(tmp_path, 3)} == {"s": 3, "a-1": 3}
    assert find_records(paths[0]) == [old]
    trim_records(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.glob("evaluations/*")) == ["a-1-000003.json", "s-000003.json"]


def test_a_version_or_a_folder_that_is_not_there_is_told(tmp_path):
    for version in (0, 3):
        write_record(tmp_path, evaluation([asked(0, [1])], version=version))
    with pytest.raises(DataError, match="of version 7") as caught:
        find_records(tmp_path, 7)
    assert caught.value.fix == "name a version that it has: 0, 3"
    with pytest.raises(DataError, match="there is no") as caught:
        find_records(tmp_path / "nope")
    assert "slime eval" not in caught.value.fix


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "questions": [1]}'])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=r"x\.json is not a record") as caught:
        find_records(tmp_path / "x.json")
    assert caught.value.code == "DAT30"
    with pytest.raises(DataError, match="no records of evaluations of version 9"):
        find_records(tmp_path, 9)


def test_two_evaluations_are_paired_by_question_and_tested_exactly():
    first = [asked(i, [float(i < 4)]) for i in range(10)]
    second = [asked(i, [float(i != 3)]) for i in reversed(range(11))]
    (found,) = compare([evaluation(first)], [evaluation(second)])
    assert (found.questions, found.left_out) == (10, 1)
    assert (found.first, found.second) == (0.4, 0.9)
    assert (found.first_only, found.second_only) == (1, 6)
    assert (found.p, found.test) == (mcnemar(1, 6), "McNemar")
    assert found.low < 0.5 < found.high
    assert "no significant difference: +0.500" in found.sentence, "p is 0.125"
    sure = compare([evaluation(first)], [evaluation([asked(i, [1.0]) for i in range(10)])])[0]
    assert sure.p == 2 / 2**6
    assert sure.sentence.startswith("s: B is better: +0.600")


def test_several_samples_a_question_are_tested_by_flipping_signs():
    first = [asked(i, [0, 0, 0, 1], category="ab"[i % 2]) for i in range(8)]
    second = [asked(i, [0, 1, 1, 1], category="ab"[i % 2]) for i in range(8)]
    (found,) = compare([evaluation(first)], [evaluation(second)])
    assert (found.test, found.p) == ("sign flip", 2 / 2**8)
    assert found.sentence.startswith("s: B is better: +0.500 [+0.500, +0.500], p = 0.00781")
    assert found.reward == {"difference": 0.5, "low": 0.5, "high": 0.5}
    assert found.categories == {"a": (4, 0.25, 0.75), "b": (4, 0.25, 0.75)}
    assert difference_tables([found])[1].rows[0] == ["a", "4", "0.25", "0.75", "+0.5"]
    json.dumps(found.to_dict())


def test_an_evaluation_against_itself_has_no_difference():
    one = [evaluation([asked(i, [i % 2]) for i in range(6)])]
    (found,) = compare(one, one)
    assert (found.p, found.first_only, found.second_only, found.low, found.high) == (1.0, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: replace(one, questions=[asked(0, [1], label="y")]), "the label of this question differs"),
        (lambda one: replace(one, threshold=0.5), "right is a reward from 1.0 on in A, and from 0.5 on in B"),
        (lambda one: replace(one, questions=[asked(1, [1])]), "there is no question that both"),
        (lambda one: replace(one, questions=[asked(0, [None])]), "there is no question that both"),
        (lambda one: replace(one, name="t"), "A has s; B has t"),
    ],
    ids=["label", "threshold", "questions", "not judged", "names"],
)
def test_evaluations_that_cannot_be_paired_are_refused(change, why):
    one = evaluation([asked(0, [1])])
    with pytest.raises(DataError) as caught:
        compare([one], [change(one)])
    assert (caught.value.code, why in caught.value.why) == ("DAT29", True), caught.value
