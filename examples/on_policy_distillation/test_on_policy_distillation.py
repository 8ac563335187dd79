"""A teacher is made, and a student learns from it, which the trainer scores by, or an engine; nightly: it learns."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELDOUT = "arithmetic_heldout"
SHORT = {
    "teacher.toml": ("stage.sft.num_rollout=20",),
    "recipe.toml": ("stage.warmup.num_rollout=20", "stage.distill.num_rollout=4"),
}


@pytest.fixture(scope="module")
def teacher(train, length):
    """The teacher's run."""
    return train(HERE / "teacher.toml", *(SHORT["teacher.toml"] if length == "short" else ()))


def whole(test):
    """Nightly, on the recipes as they stand."""
    return pytest.mark.nightly(pytest.mark.parametrize("length", ["whole"], indirect=True)(test))


def kl(run):
    """The student's reverse KL to its teacher, a step each."""
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"]["opd_reverse_kl"] for row in rows if "opd_reverse_kl" in row["metrics"]]


@pytest.fixture(scope="module")
def student(teacher, length, train):
    """The student's run, with the teacher in the trainer."""
    flags = SHORT["recipe.toml"] if length == "short" else ()
    return train(HERE / "recipe.toml", "--teacher-load", teacher / "final", *flags)


@whole
def test_the_teacher_is_right(teacher, scores):
    [best] = scores(teacher, HELDOUT)
    assert best >= 0.95


@whole
def test_the_student_comes_close_to_its_teacher(teacher, student, scores):
    [best] = scores(teacher, HELDOUT)
    warm, end = scores(student, HELDOUT)
    assert warm <= 0.45
    assert end >= 0.85 * best
    found = kl(student)
    assert sum(found[-5:]) < 0.4 * sum(found[:5])


@pytest.mark.nightly
def test_a_teacher_that_is_an_engine_says_the_same(teacher, student, train):
    started = ("--hf-checkpoint", student / "final", "--init-weights", "load", "--teacher-load", teacher / "final")
    flags = (*started, "--num-rollout", "1", "--save-interval", "0", "stage.warmup.num_rollout=0")
    runs = [train(HERE / "recipe.toml", *flags, "--teacher-place", place) for place in ("trainer", "engine")]
    here, there = map(kl, runs)
    assert len(here) == 1
    assert there == pytest.approx(here, abs=1e-4)
