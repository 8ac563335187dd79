"""What the terminal's view is made of: curves of dots, the run as its files describe it, texts that fit."""

import asyncio
import json
import os

import pytest
from rich.console import Console

from slime_core.config.dump import to_toml
from slime_core.config.schema import Config
from slime_core.errors import StorageError
from slime_core.report import RunDir
from slime_core.report.samples import row as sample_row
from slime_core.types import Sample, Status
from slime_report.recorder import FOLDER, LINES
from slime_watch.curves import curve
from slime_watch.follower import RunFollower
from slime_watch.server import LivePage
from slime_watch.views import VIEWS, ViewPage, head

pytestmark = pytest.mark.unit


@pytest.fixture
def run_dir(tmp_path):
    with RunDir.create("demo", root=tmp_path) as run_dir:
        run_dir.write_config(to_toml(Config(name="demo")))
        yield RunDir(run_dir.path)


def step(version, stage="main", seconds=2.0, **metrics):
    facts = {"kind": "step", "version": version, "stage": stage, "step": version - 1, "of": 9}
    return facts | {"metrics": metrics, "seconds": {"train": seconds, "rollout": seconds}}


def append(path, *rows):
    with path.open("a") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def shown(text, width=80):
    console = Console(width=width, no_color=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(text, end="")
    return capture.get().splitlines()


def test_a_curve_by_hand():
    # 2x1 characters are 4 columns and 4 rows of dots, so this line is a diagonal from the lower left to the upper right
    assert curve([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], 2, 1) == ["⡠⠊"]
    # two columns, twelve rows: dots of the left column from the bottom to row 6, those of the right one from row 5 up
    assert curve([(0, 0.0), (1, 5.0)], 1, 3) == ["⢸", "⡜", "⡇"]
    assert curve([(1, 7.0)], 1, 1) == ["⠠"]  # a constant is in the middle
    assert curve([], 2, 1) == ["⠀⠀"]
    # points on one column are averaged: 0 and 10 are at 5, as high as the constant beside them
    assert curve([(0.0, 0.0), (0.01, 10.0), (1.0, 5.0)], 1, 1) == ["⠤"]


def test_a_run_is_followed_through_half_lines_damage_trims_and_its_end(run_dir):
    follower = RunFollower(run_dir)
    follower.look()
    assert (follower.steps, follower.running, follower.total) == ([], True, Config().rollout.num_rollout)
    append(run_dir.metrics, step(1, **{"reward/mean": 0.5, "loss": None}), '{"kind": "st')
    assert follower.look()
    assert follower.series["reward/mean"] == [(1.0, 0.5)]
    assert "loss" not in follower.series  # null: it was not finite
    cursor = follower.cursor
    append(run_dir.metrics, "ep\n[1]\n", step(2, **{"reward/mean": 0.75, "tokens/response": 40.0}))
    append(
        run_dir.metrics, {"kind": "eval", "version": 2, "name": "held", "metrics": {"reward/mean": 1}, "seconds": {}}
    )
    assert follower.look()
    assert not follower.look()
    assert (follower.series["reward/mean"], follower.damaged) == ([(1.0, 0.5), (2.0, 0.75)], 2)
    assert follower.evaluations() == {"held": [(2.0, 1.0)]}
    assert follower.tokens_per_second == 40 / 8  # two steps of 4 s
    assert follower.eta == (follower.total - 2) * 4

    update = follower.update(cursor)
    assert (update["run"]["whole"], update["run"]["steps"]["version"]) == (False, [2])
    assert update["run"]["steps"]["metrics"]["reward/mean"] == [0.75]
    assert "2 of the lines" in update["run"]["notices"][0]
    assert follower.update(update["cursor"])["run"]["steps"]["version"] == []
    assert follower.update("")["run"]["steps"]["version"] == [1, 2]

    kept = run_dir.metrics.read_text().splitlines(keepends=True)[:1]
    other = run_dir.metrics.with_suffix(".new")
    other.write_text("".join(kept))
    other.rename(run_dir.metrics)  # as a resume trims
    append(run_dir.metrics, step(2, **{"reward/mean": 0.25}))
    follower.look()
    assert follower.series["reward/mean"] == [(1.0, 0.5), (2.0, 0.25)]
    assert follower.update(update["cursor"])["run"]["whole"]


def test_a_step_that_is_written_twice_counts_once_and_the_later_counts(run_dir):
    follower = RunFollower(run_dir)
    append(run_dir.metrics, step(1, loss=1.0), step(2, loss=2.0))
    follower.look()
    cursor = follower.cursor
    append(
        run_dir.metrics, {"kind": "restart", "version": 1, "number": 1, "of": 3, "cause": "TRN105"}, step(2, loss=3.0)
    )
    follower.look()
    assert follower.series["loss"] == [(1.0, 1.0), (2.0, 3.0)]
    update = follower.update(cursor)["run"]
    assert (update["whole"], update["steps"]["metrics"]["loss"]) == (True, [1.0, 3.0])
    assert update["restarts"][0]["cause"] == "TRN105"


def test_what_a_resume_writes_anew_counts_and_rows_are_read_as_the_report_reads_them(run_dir):
    follower = RunFollower(run_dir)
    held = {"kind": "eval", "version": 1, "name": "held", "metrics": {"reward/mean": 0.5}}
    append(run_dir.metrics, held, {"kind": "step", "version": 1}, held | {"metrics": {"reward/mean": 0.25}})
    append(run_dir.metrics, {"kind": "step"}, {"kind": "eval", "version": 1})
    append(run_dir.samples, {"version": 1, "rank": "best"}, {"version": 2, "rank": "best"})
    follower.look()
    assert follower.damaged == 2
    run = follower.update("")["run"]
    assert (run["steps"]["version"], run["steps"]["seconds"], follower.seconds(1)) == ([1], {}, {})
    assert run["evaluations"]["held"]["metrics"]["reward/mean"] == [0.25]
    assert follower.evaluations() == {"held": [(1.0, 0.25)]}
    assert [row["version"] for row in follower.samples] == [1, 2]

    run_dir.samples.write_text('{"version": 1, "rank": "best"}\n')
    total = follower.total
    config = Config.model_validate({"name": "demo", "rollout": {"num_rollout": total + 5}})
    run_dir.write_config(to_toml(config))
    follower.look()
    assert [row["version"] for row in follower.samples] == [1]
    assert follower.total == total + 5


def test_nothing_is_read_while_an_update_is_put_together(run_dir):
    append(run_dir.metrics, step(1, loss=1.0))
    (run_dir.path / FOLDER).mkdir()
    records = run_dir.path / FOLDER / LINES
    os.mkfifo(records)  # the update waits for what is written here
    page = LivePage(RunDir(run_dir.path), "t", lambda: None)
    scope = {"method": "GET", "path": "/updates", "query_string": b"token=t", "headers": [(b"host", b"localhost")]}
    sent = []

    async def send(message):
        sent.append(message)

    async def body():
        request = asyncio.ensure_future(page(scope, None, send))
        with await asyncio.to_thread(records.open, "w"):
            assert page._looking.locked()
        await request

    asyncio.run(body())
    assert json.loads(sent[1]["body"])["run"]["steps"]["version"] == [1]


def test_a_run_directory_that_goes_away_is_an_error_with_its_new_command(run_dir, tmp_path):
    follower = RunFollower(run_dir)
    follower.look()
    run_dir.path.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="was removed or moved") as caught:
        follower.look()
    assert caught.value.code == "STO111"


HOSTILE = "\x1b]0;owned\x07\x1b[2J<script>\u202eevil\r\n[bold]x[/bold] " + "wide 漢字 " * 20


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60)], ids=["80x24", "40x12", "200x60"])
def test_every_view_fits_its_terminal_and_obeys_nothing_of_a_models_text(run_dir, size):
    width, height = size
    for version in range(1, 40):
        metrics = {"reward/mean": version / 40, "entropy": 1 / version, HOSTILE: 1.0, "grad_norm": 2.0}
        append(run_dir.metrics, step(version, "warmup" if version < 10 else HOSTILE, **metrics))
    sample = Sample(id="p-0", prompt=HOSTILE, response=HOSTILE, label=HOSTILE, reward=0.5, status=Status.COMPLETED)
    append(run_dir.samples, sample_row(38, "best", sample))
    append(run_dir.log / "run.log", f"2026-11-27T10:00:00 {HOSTILE!r}\n", "\x1b[31mred\n")
    follower = RunFollower(run_dir)
    follower.look()
    assert follower.stage_start == 9
    for everything in (False, True):
        for name, view in VIEWS.items():
            text = view(follower, ViewPage(width=width - 1, height=height - 3, everything=everything))
            lines = shown(text, width)
            assert not set("\x1b\x07\x1a\r\u202e") & set("".join(lines)), name
            if name == "curves":
                assert len(lines) <= height - 3
                assert max(len(line) for line in text.plain.split("\n")) <= width - 1
            if name == "samples":
                assert "<script>" in text.plain
                assert "[bold]x[/bold]" in text.plain
    top = shown(head(follower, width), width)
    assert len(top) == 2
    assert "running" in top[0]


def test_the_phase_is_the_part_of_the_step_that_runs(run_dir):
    follower = RunFollower(run_dir)
    append(run_dir.metrics, step(1, loss=1.0))
    follower.look()
    assert "between parts" in shown(head(follower, 80))[1]
    run_dir.phase.write_text("train                            1000.000\n")
    follower.look()
    assert "train 5s" in shown(head(follower, 80, now=1005.0))[1]
