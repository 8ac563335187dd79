"""`slime run` with two SGLang servers that evaluates beside training: each evaluation has one version's tokens alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_run import STEPS, WARMUP, Driver, Work, in_order

from slime_core.rollout.dump import evaluation_path, read_dump

pytestmark = [pytest.mark.system, pytest.mark.nightly]

EVALUATED = """[eval]
eval_async = true
eval_interval = 2
eval_tasks = [{ name = "arithmetic_heldout" }]
"""
FLAGS = ("--no-colocate", "--rollout-num-engines", "2", "--rollout-router", "builtin", "--max-staleness", "1")


@pytest.fixture
def work(tmp_path: Path, served_model: Path, sglang_python: str) -> Work:
    made = Work.make(tmp_path / "w", served_model, sglang_python)
    text = (made.folder / "recipe.toml").read_text()
    assert "[eval]\n" in text
    text = text.replace("[eval]\n", EVALUATED).replace("[plugin.rm_math]\n", "[plugin.rm_math]\nheldout_rows = 12\n")
    (made.folder / "recipe.toml").write_text(text)
    return made


def test_one_evaluates_with_the_weights_that_it_has_while_another_takes_updates(
    work: Work, drivers: list[Driver]
) -> None:
    drivers.append(work.start(*FLAGS, "--save-debug-rollout-data", "dumps", "--check-weights", "all"))
    ended = drivers[-1].wait(400)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    in_order(work)
    rows = map(json.loads, (work.run / "metrics.jsonl").read_text().splitlines())
    versions = [row["version"] for row in rows if row["kind"] == "eval"]
    assert sorted(set(versions)) == list(range(2, STEPS + 1, 2))
    for version in (2, *range(WARMUP + 2, STEPS, 2)):  # those beside training
        groups = read_dump(evaluation_path(work.folder / "dumps", "arithmetic_heldout", version))
        made = {v for group in groups for sample in group.samples for v in sample.weight_versions}
        assert made == {version}
