"""Recipes over several seeds: what a run wrote is read, a process a seed is trained, the table and exit code say how."""

import json
import sys
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.unit

SLIME = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[3:]  # after -m slime_cli.main
folder = Path(words[words.index("--run-dir") + 1])
if "--fail" in words: sys.exit("no room is left")
folder.mkdir()
(folder / "words.json").write_text(json.dumps(words))
sum(range(3_000_000))
print("trained")
"""


@dataclass
class Reached:
    """An outcome whose seed 4 misses."""

    seed: int

    @property
    def good(self):
        return self.seed != 4

    @property
    def row(self):
        return f"| {self.seed} | {self.good} |"


@pytest.fixture
def seeds(tool, tmp_path, monkeypatch):
    """The module, and an interpreter whose `slime` writes down its words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(SLIME.format(python=sys.executable))
    (tmp_path / "bin" / "python").chmod(0o755)
    found = tool("recipe_seeds")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return found


def test_an_evaluation_is_read_after_the_first_stage_and_at_the_end(seeds, tmp_path):
    rows = [{"kind": "step", "version": v, "stage": "warmup" if v < 4 else "grpo"} for v in range(1, 6)]
    rows += [
        {"kind": "eval", "version": v, "name": "heldout", "metrics": {"reward/mean": v / 10}} for v in (0, 3, 4, 5)
    ]
    rows += [{"kind": "eval", "version": 9, "name": "another", "metrics": {"reward/mean": 0.0}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = seeds.Run(7, tmp_path, 100.0)
    assert run.evaluated("heldout") == ({"reward/mean": 0.3}, {"reward/mean": 0.5})
    assert run.steps == 5


def test_every_seed_is_trained_in_a_process_and_has_a_row(seeds, tmp_path, capsys):
    runs = []

    def read(run):
        runs.append(run)
        return Reached(run.seed)

    recipes = [
        seeds.Recipe(words=("a.toml",), seeds=2, columns=("seed", "good"), read=read, name=name) for name in ("a", "b")
    ]
    kept = tmp_path / "kept"
    assert seeds.main("What it is.", *recipes, words=["--keep", str(kept), "--first", "1", "train.lr=1e-3"]) == 0
    assert [(run.seed, run.folder) for run in runs] == [
        (n, kept / name / f"seed-{n}") for name in "ab" for n in (1, 2)
    ]
    assert all(run.processor > 0 and run.seconds > 0 for run in runs)
    said = json.loads((kept / "a" / "seed-2" / "words.json").read_text())
    assert said == ["run", "a.toml", "train.lr=1e-3", "--seed", "2", "--run-dir", str(kept / "a" / "seed-2")]
    assert (kept / "b" / "seed-1.log").read_text() == "trained\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:6] == ["| seed | good |  |", "| --- | --- | --- |", "| 1 | True |", "| 2 | True |"]


def test_a_seed_that_misses_a_target_is_the_exit_code(seeds, tmp_path):
    recipe = seeds.Recipe(words=(), seeds=1, columns=("seed",), read=lambda run: Reached(run.seed))
    assert seeds.main("What it is.", recipe, words=["--first", "4"]) == 1
    assert seeds.main("What it is.", recipe, words=["--first", "4", "--seeds", "0"]) == 0


def test_a_run_that_fails_ends_the_benchmark_with_its_words(seeds, tmp_path):
    with pytest.raises(SystemExit, match=r"--seed 3 --run-dir \S+: exit code 1\nno room is left"):
        seeds.train(3, ("--fail",), tmp_path)
