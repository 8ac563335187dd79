"""Rows are whole and apart, the reward judges the last number, and the recipe trains any model it is given."""

import json
import re
import sys
from pathlib import Path

import pytest

from slime_core.testing import tiny_model

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # as a run does for a function's file

import make_rows  # noqa: E402
from reward import ANSWERED, answers, score  # noqa: E402

from slime_core.types import Status  # noqa: E402

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def rows(task, part):
    lines = (HERE / "rows" / f"{task}_{part}.jsonl").read_text().splitlines()
    return [(row["question"][0]["content"], row["answer"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize("task", make_rows.TASKS)
def test_no_question_is_twice_and_none_that_is_held_out_trains(task):
    train, heldout = rows(task, "train"), rows(task, "heldout")
    assert (len(train), len(heldout)) == (make_rows.TRAIN, make_rows.HELDOUT)
    assert len({question for question, _ in train + heldout}) == len(train) + len(heldout)
    assert all(re.fullmatch(r"-?\d+", answer) for _, answer in train + heldout)


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_answers_of_sums_are_what_the_sums_are(part):
    for question, answer in rows("chain_sum", part):
        terms = re.findall(r"[+-]?\d+", question.partition(":")[2].replace(" ", ""))
        assert sum(map(int, terms)) == int(answer), question


def test_the_shipped_rows_are_those_that_reasoning_gym_draws(tmp_path):
    make_rows.main(tmp_path)
    for path in (HERE / "rows").iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text(), "run make_rows.py"


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("12 + 30 = 42.", "42", 1.0),
        ("The answer is **1,280**", "1280", 1.0),
        ("5 - 9 = -4", "-4", 1.0),
        ("42, or 43", "42", 0.0),
        ("3.42", "3", 0.0),
        ("forty-two", "42", 0.0),
        ("", "0", 0.0),
    ],
)
def test_the_last_whole_number_counts(response, label, value):
    assert score(response, label) == value


@pytest.mark.parametrize(
    ("response", "status", "ends"),
    [
        ("2 + 2 = 5.", Status.COMPLETED, True),
        ("It is **5**\n", Status.COMPLETED, True),
        ("5 apples", Status.COMPLETED, False),
        ("2 + 2 = 5", Status.TRUNCATED, False),
    ],
)
def test_an_answer_is_a_number_at_the_end_of_a_response_that_ended_by_itself(response, status, ends):
    assert answers(response, status) is ends
    assert 0 < ANSWERED < 1


def test_a_short_run_judges_both_tasks_and_evaluates_both_sets(train, tmp_path):
    model = tiny_model(tmp_path / "model", hidden=16, layers=1, context_len=1024, chat_template=CHAT)
    sizes = ("stage.grpo.num_rollout=2", "stage.grpo.rollout_batch_size=4", "stage.grpo.n_samples_per_prompt=2")
    short = [
        {"name": f"{task}_heldout", "prompt_data": f"{HERE}/rows/{task}_heldout.jsonl@[:4]"}
        for task in make_rows.TASKS
    ]
    sets = ", ".join("{" + ", ".join(f'{key} = "{value}"' for key, value in one.items()) + "}" for one in short)
    run = train(
        HERE / "recipe.toml",
        "--hf-checkpoint",
        model,
        *sizes,
        f"eval.eval_tasks=[{sets}]",
        "--rollout-max-response-len",
        "8",
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {(line["name"], line["version"]) for line in lines if line["kind"] == "eval"} == {
        (f"{task}_heldout", version) for task in make_rows.TASKS for version in (0, 2)
    }
    assert all(line["metrics"]["samples"] == 4 * 8 for line in lines if line["kind"] == "eval")
    assert sum(line["kind"] == "step" for line in lines) == 2
