"""Figures and verdicts of the benchmarks of a real model."""

import json

import pytest

pytestmark = pytest.mark.unit


def test_figures_of_a_run_leave_out_the_steps_that_compile(tool, tmp_path):
    steps = [
        {"kind": "step", "seconds": {"rollout": r, "train": 1.0}, "metrics": {}} for r in (30.0, 9.0, 2.0, 4.0, 3.0)
    ]
    evals = [{"kind": "eval", "metrics": {"reward/mean": value}} for value in (0.125, 0.375)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [evals[0], *steps, evals[1]]))
    bench = tool("bench_real_model")
    found = bench.of_run(tmp_path, 0.0)
    assert (found["steps"], found["first_step_s"], found["step_s"]) == (5, 31.0, 4.0)
    assert found["parts_s"] == {"rollout": 3.0, "train": 1.0}
    assert bench.row({"engine": "local", "whole_run_s": 60.2, **found}) == (
        "| slime, embedded engine | 4.0 | rollout 3.00, train 1.00 | 31.0 | 60 s for 5 steps | 0.125 to 0.375 |"
    )


def test_figures_of_trl_are_its_last_line(tool):
    out = 'loading\n{"steps": [9.0, 5.0, 3.0, 4.0], "held_out": 0.25}\n'
    found = tool("bench_real_model").of_trl(out)
    assert (found["steps"], found["step_s"], found["held_out"]) == (4, 3.5, [None, 0.25])
    assert tool("bench_real_model").of_trl("it died")["step_s"] is None


@pytest.mark.parametrize(
    ("sums", "words", "good"),
    [
        ({0: 0.1, 20: 0.15, 40: 0.2}, {0: 0.02, 40: 0.04}, True),
        ({0: 0.1, 20: 0.5, 40: 0.19}, {0: 0.02, 40: 0.04}, False),
        ({0: 0.1, 40: 0.2}, {0: 0.0, 40: 0.0}, False),
    ],
    ids=["both doubled", "one fell back", "nothing twice is nothing"],
)
def test_a_seed_is_good_where_both_sets_double_to_the_end(tool, sums, words, good):
    outcome = tool("learn_real_model").Outcome(0, (sums, words), 90.0)
    assert outcome.good is good
    assert outcome.row.endswith(f"| 90 | {'ok' if good else 'missed'} |")


def test_both_sides_stand_in_one_line_of_the_table(tool):
    rows = [
        {"side": "embedded", "shape": "4B", "first_token_s": 9.5},
        {"side": "embedded", "shape": "4B", "in_flight": 64, "tokens_per_s": 9000},
        {"side": "sglang", "shape": "4B", "first_token_s": 90.0},
        {"side": "sglang", "shape": "4B", "in_flight": 64, "tokens_per_s": 10000},
        {"side": "sglang", "shape": "4B", "in_flight": 256, "tokens_per_s": 20000},
    ]
    lines = tool("bench_engine_vs_sglang").table(rows).splitlines()
    assert lines[2:] == ["| 4B | 64 | 9000 | 10000 | 0.90 | 9.5 | 90.0 |", "| 4B | 256 | - | 20000 | - | 9.5 | 90.0 |"]
