"""What `slime show` reads back from a run directory."""

import asyncio
import json
import shutil

import pytest

from slime_core.ledger.ledger import SqliteLedger
from slime_core.report import RunDir, history
from slime_core.report.following import Lines, Steps
from slime_core.report.recorded import open_recorded
from slime_core.types import Drop

pytestmark = pytest.mark.unit


@pytest.fixture
def run_dir(tmp_path):
    with RunDir.create("demo", root=tmp_path) as made:
        yield made


def step(version, seconds=1.0, **metrics):
    return {
        "kind": "step",
        "version": version,
        "stage": "main",
        "step": version - 1,
        "of": 9,
        "metrics": metrics,
        "seconds": {"train": seconds, "rollout": 2 * seconds},
    }


def test_first_last_and_best_by_hand():
    steps = [step(1, **{"reward/mean": 0.2, "loss": 3.0, "x": 1.0}), step(2, **{"reward/mean": 0.9, "loss": 1.0})]
    steps.append(step(3, **{"reward/mean": 0.5, "loss": 2.0, "x": None}))
    assert history.summary(steps) == {
        "loss": {"first": 3.0, "last": 2.0, "best": 1.0},
        "reward/mean": {"first": 0.2, "last": 0.5, "best": 0.9},
        "x": {"first": 1.0, "last": 1.0, "best": None},
    }


def test_times_and_speed_by_hand():
    steps = [step(1, 1.0, **{"tokens/response": 30.0}), step(2, 3.0, **{"tokens/response": 90.0})]
    assert history.times(steps) == {"train": 4.0, "rollout": 8.0}
    assert history.tokens_per_second(steps) == 10.0
    assert history.tokens_per_second([]) is None


def test_a_line_that_a_crash_cut_short_is_left_out(run_dir):
    rows = [step(1, a=1.0), step(2, a=2.0), step(2, a=3.0)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    run_dir.metrics.write_text(text + '{"kind": "step", "versi')
    assert [(row["version"], row["metrics"]["a"]) for row in history.steps_of(run_dir)] == [(1, 1.0), (2, 3.0)]


def test_rows_without_a_version_are_left_out_and_tables_that_lack_are_empty(run_dir):
    rows = [{"kind": "step"}, {"kind": "eval", "version": 1}, {"kind": "step", "version": 1, "metrics": []}]
    rows += [{"kind": "step", "version": 3}, {"kind": "eval", "version": 3, "name": "held"}]
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    empty = {"metrics": {}, "seconds": {}}
    assert history.steps_of(run_dir) == [
        {"kind": "step", "version": 1, **empty},
        {"kind": "step", "version": 3, **empty},
    ]
    assert [(row["version"], row["name"]) for row in history.evaluations_of(run_dir)] == [(3, "held")]
    assert history.summary(history.steps_of(run_dir)) == history.times(history.steps_of(run_dir)) == {}
    run_dir.samples.write_text('{"rank": "best"}\n{"version": 1}\n')
    assert history.last_samples(run_dir) == [{"version": 1}]


def test_a_history_without_files_has_no_steps(run_dir):
    assert history.steps_of(run_dir) == []
    assert history.evaluations_of(run_dir) == []
    assert history.states(run_dir) == {}
    assert history.last_samples(run_dir) == []


def test_states_are_those_that_the_ledger_counts(run_dir, group):
    async def fill():
        ledger = SqliteLedger(run_dir.path)
        groups = [group(i, [1.0, 0.0], [2, 2]) for i in range(3)]
        await ledger.issue(groups)
        await ledger.finish(groups[0])
        await ledger.drop([(groups[1].samples, Drop(reason="zero_std"))])
        counts = dict(await ledger.counts())
        await ledger.close()
        return counts

    counts = asyncio.run(fill())
    assert counts["dropped/zero_std"] == 2
    shutil.rmtree(run_dir.segments)
    files = sorted(run_dir.path.iterdir())
    assert history.states(run_dir) == counts
    with open_recorded(run_dir) as recorded:
        assert recorded.samples(recorded.members(1)) == []
    assert sorted(run_dir.path.iterdir()) == files, "nothing is written"

    local = run_dir.path / "local"  # another machine's: of the copies, the one of the newest checkpoint is read
    run_dir.write_config(f'[report]\nledger_dir = "{local}"\n')
    for name in ("step-10", "step-9"):
        folder = run_dir.checkpoints / name
        folder.mkdir()
        shutil.copy(run_dir.ledger, folder) if name == "step-10" else (folder / run_dir.ledger.name).write_text("")
    run_dir.ledger.unlink()
    assert history.states(run_dir) == counts
    open_recorded(run_dir).close()


def test_the_samples_of_the_last_step_are_shown(run_dir):
    rows = [{"version": v, "rank": "best", "id": str(v)} for v in (1, 2, 2)]
    run_dir.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["id"] for row in history.last_samples(run_dir)] == ["2", "2"]


def test_lines_come_whole_and_once_and_the_first_look_gives_the_last_of_them(tmp_path):
    path = tmp_path / "log"
    lines = Lines(path, last=2)
    assert lines.new() == []
    path.write_text("a\nb\nc\nd")
    assert lines.new() == ["b", "c"]
    with path.open("a") as file:
        file.write("e\nf\n")
    assert lines.new() == ["de", "f"]
    assert lines.new() == []
    path.write_text("x\ny")  # trimmed, as figures are at a resume
    assert lines.new() == ["x"]
    path.write_text("z\n")
    assert lines.new() == ["z"]


def test_figures_are_said_as_the_run_says_them(small):
    rows = (small.run / "metrics.jsonl").read_text().splitlines()
    steps = Steps(RunDir.open(small.run))
    said = [steps.line(row) for row in rows]
    assert said[0].startswith("warmup step 1/1  ")
    assert any(line.startswith("grpo step 3/3  ") and line.endswith("eta 0s") for line in said)
    assert any(line.startswith("eval held at step ") for line in said)
    assert "loss 1.0" in steps.line(json.dumps(step(4, loss=1.0) | {"seconds": {"train": None}}))
    assert steps.line(json.dumps(step(4) | {"seconds": []})) == ""
    assert steps.line('{"kind": "restart"}') == steps.line('{"kind": "st') == ""
    assert "len 3" in steps.line(json.dumps(step(4) | {"metrics": {"loss": None, "response_len/mean": 3.0}}))
