"""The demo's benchmark reads what a run wrote, and says whether every target was met."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TOOL = Path(__file__).parents[1] / "tools" / "bench_demo.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_demo", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_demo", module)
    spec.loader.exec_module(module)
    return module


def write(folder, accuracies):
    rows = [{"kind": "step", "version": v, "stage": "warmup" if v < 4 else "grpo"} for v in range(1, 6)]
    for version, value in accuracies.items():
        rows.append(
            {"kind": "eval", "version": version, "name": "arithmetic_heldout", "metrics": {"reward/mean": value}}
        )
    rows.append({"kind": "eval", "version": 3, "name": "another", "metrics": {"reward/mean": 0.0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_accuracy_is_read_after_the_first_stage_and_at_the_end(tool, tmp_path):
    write(tmp_path, {0: 0.01, 3: 0.44, 4: 0.7, 5: 0.98})
    found = tool.read(7, tmp_path, 100.0)
    assert (found.seed, found.warmup, found.final, found.steps) == (7, 0.44, 0.98, 5)


@pytest.mark.parametrize(
    ("warmup", "final", "seconds", "good"),
    [(0.5, 0.9, 180.0, True), (0.51, 0.98, 90.0, False), (0.4, 0.89, 90.0, False), (0.4, 0.98, 181.0, False)],
    ids=["on-the-line", "warm-up-too-good", "end-too-bad", "too-slow"],
)
def test_a_seed_is_good_where_it_meets_every_target(tool, warmup, final, seconds, good):
    outcome = tool.Outcome(seed=0, warmup=warmup, final=final, steps=2, seconds=seconds)
    assert outcome.good is good
