"""Each tracker by its own library and its own reader: every step once, also after a crash and a resume."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from shutil import rmtree
from types import ModuleType

import numpy as np
import pytest

from slime_core.config.schema import Config
from slime_core.report import Report, RunDir
from slime_core.types import Group, Prompt, Sample, StepReport
from slime_trackers.feed import SampleRows, TrackerFeed, read_reports, series_of
from slime_trackers.mlflow_run import MlflowRun, legal
from slime_trackers.options import TrackerOptions
from slime_trackers.tensorboard_run import TensorBoardRun
from slime_trackers.trackio_run import TrackioRun
from slime_trackers.wandb_run import WandbRun

pytestmark = pytest.mark.integration


def step(version, reward=0.0, **metrics):
    metrics = {"reward/mean": reward, "loss": float("nan"), **metrics}
    return StepReport(version=version, stage="main", step=version - 1, of=9, metrics=metrics, seconds={"train": 0.5})


def samples(version):
    made = [
        Sample(id=f"main/{version}-{n}", prompt="1+1=", response="<b>2</b>", reward=float(n), tokens=[1, 2])
        for n in range(2)
    ]
    return [Group(prompt=Prompt(id=f"main/{version}"), samples=made, rollouts={0: [0], 1: [1]})]


class Process:
    """One process of a run in a folder, with its trackers; ``crash`` leaves them as they are."""

    def __init__(self, path, trackers, **options):
        self.arrays = {}
        options = TrackerOptions(tracker_samples_interval=2, **options)
        self.feeds = [TrackerFeed(tracker(), options, self.arrays) for tracker in trackers]
        self.notes = []
        self.run_dir = RunDir.reopen(path) if path.exists() else RunDir.create("demo", at=path)
        self.report = Report(self.run_dir, Config(name="demo", seed=7), self.feeds)
        self.report.start()

    def steps(self, *reports):
        for report in reports:
            self.arrays[report.version] = {"histograms/reward": np.arange(4.0)}
            self.report.samples(report.version, samples(report.version))
            self.report.step(report)
        return self

    def finish(self):
        self.report.finish()
        self.run_dir.close()
        return (self.run_dir.log / "run.log").read_text() if (self.run_dir.log / "run.log").exists() else ""


def trim(path, version):
    """What a resume does first."""
    from slime_cli.trim import trim_figures

    trim_figures(RunDir(path), version)


def stopped_and_resumed(path, tracker, **options):
    """Steps 1 to 4 and an evaluation, then a resume from checkpoint 2 that makes 3 and 4 again with other rewards."""
    first = Process(path, [tracker], **options).steps(step(1, 0.1), step(2, 0.2))
    first.report.evaluation("held", 2, {"reward/mean": 0.25, "seconds": 1.0})
    assert "failed" not in first.steps(step(3, 0.3), step(4, 0.4)).finish()
    trim(path, 2)
    again = Process(path, [tracker], **options).steps(step(3, 3.0), step(4, 4.0), step(5, 5.0))
    assert "failed" not in again.finish()


def test_tensorboard_has_every_step_once_and_those_that_were_made_again_replace_the_old(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"tensorboard_dir": tmp_path / "boards", "tb_project_name": "p", "tracker_notes": "a note"}
    stopped_and_resumed(tmp_path / "run", TensorBoardRun, **options)
    events = EventAccumulator(
        str(tmp_path / "boards" / "p" / "run"), size_guidance={"scalars": 0, "histograms": 0}
    ).Reload()
    rewards = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert rewards == pytest.approx({1: 0.1, 2: 0.2, 3: 3.0, 4: 4.0, 5: 5.0})
    assert len(events.Scalars("reward/mean")) == 5
    assert [(event.step, event.value) for event in events.Scalars("eval/held/reward/mean")] == [(2, 0.25)]
    assert [event.step for event in events.Scalars("time/train")] == [1, 2, 3, 4, 5]
    assert "loss" not in events.Tags()["scalars"]  # not finite
    assert [event.step for event in events.Histograms("histograms/reward")] == [1, 2, 3, 4, 5]
    texts = {tag: events.Tensors(tag)[-1] for tag in ("samples/text_summary", "config/text_summary")}
    assert texts["samples/text_summary"].step == 4
    assert b"main/4" not in texts["samples/text_summary"].tensor_proto.string_val[0]
    assert b"<b>2</b>" in texts["samples/text_summary"].tensor_proto.string_val[0]
    assert b"| seed | 7 |" in texts["config/text_summary"].tensor_proto.string_val[0]


def records(data):
    """Records of a .wandb file: LevelDB's log format behind 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def wandb_rows(folder):
    """Every row of history of the offline runs in a folder, and the ids of the runs."""
    from wandb.proto import wandb_internal_pb2 as protocol

    rows, ids = [], set()
    for path in sorted(folder.glob("*/wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = protocol.Record.FromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            if record.history.item:
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows, ids


def test_wandb_offline_has_every_step_with_tables_and_no_argv(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["slime", "--api-key", "canary-in-argv"])
    monkeypatch.setitem(sys.modules, "mcp", ModuleType("mcp"))  # a library that W&B would comment on
    run = tmp_path / "run"
    first = Process(run, [WandbRun], tracker_notes="a note").steps(step(1, 0.1), step(2, 0.2))
    first.report.evaluation("held", 2, {"reward/mean": 0.25, "seconds": 1.0})
    assert "failed" not in first.steps(step(3, 0.3), step(4, 4.0)).finish()
    rows, ids = wandb_rows(tmp_path)
    assert len(ids) == 1
    assert [(row["_step"], row["reward/mean"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.0)]
    assert rows[1]["eval/held/reward/mean"] == 0.25
    assert "loss" not in rows[0]
    assert rows[3]["samples/_type"] == "table-file"
    assert rows[3]["histograms/reward/_type"] == "histogram"
    (table,) = tmp_path.glob("run/wandb/offline-run-*/files/media/table/samples_4*.json")
    assert json.loads(table.read_text())["data"][0][:2] == ["best", "main/4-1"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"canary-in-argv" in path.read_bytes()]
    assert capfd.readouterr() == ("", "")


def test_mlflow_in_a_file_has_every_step_once_with_legal_names_and_parameters(tmp_path):
    from mlflow import MlflowClient

    names = {"odd (name), 100%/a//b": 1.0}
    path, options = tmp_path / "run", {"tracker_notes": "a note", "mlflow_experiment": "e"}
    first = Process(path, [MlflowRun], **options).steps(step(1, 0.1, **names), step(2, 0.2), step(3, 0.3))
    assert "failed" not in first.finish()
    trim(path, 2)
    assert "failed" not in Process(path, [MlflowRun], **options).steps(step(3, 3.0), step(4, 4.0)).finish()
    client = MlflowClient(f"sqlite:///{path}/mlflow.sqlite")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.0)]
    assert run.data.metrics["odd _name__ 100_/a/b"] == 1.0
    assert "loss" not in run.data.metrics
    assert run.data.params["seed"] == "7"
    assert run.data.tags["mlflow.note.content"] == "a note"
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    files = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert files == ["samples/000002.json", "samples/000004.json"]


@pytest.mark.parametrize(
    ("name", "other"),
    [("a/b c", "a/b c"), ("../x", "x"), ("/a//b", "a/b"), ("ü%", "__"), ("", "_"), ("a" * 999, "a" * 250)],
)
def test_names_for_mlflow(name, other):
    assert legal(name) == other


def test_trackio_has_every_step_once(tmp_path, monkeypatch):
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.sqlite_storage, trackio.utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    stopped_and_resumed(tmp_path / "run", TrackioRun, trackio_project="p")
    storage = trackio.sqlite_storage.SQLiteStorage
    (name,) = storage.get_runs("p")
    rows = storage.get_logs("p", name)
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 5.0)]
    assert [row["step"] for row in rows if "samples" in row] == [2, 4]


def test_a_tracker_that_comes_late_gets_all_earlier_steps_and_two_work_at_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    first = Process(run, []).steps(step(1, 0.1), step(2, 0.2))
    first.report.evaluation("held", 2, {"reward/mean": 0.25})
    first.finish()
    assert "failed" not in Process(run, [TensorBoardRun, WandbRun]).steps(step(3, 0.3)).finish()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("eval/held/reward/mean")] == [2]
    rows, _ = wandb_rows(tmp_path)
    assert [row["_step"] for row in rows] == [1, 2, 3]


def test_a_tracker_that_fails_costs_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    options = {"tensorboard_dir": tmp_path / "file" / "x", "mlflow_uri": "http://127.0.0.1:9"}
    log = Process(tmp_path / "run", [TensorBoardRun, MlflowRun], **options).steps(step(1), step(2)).finish()
    assert "TrackerFeed failed; training continues: RuntimeError: tensorboard: NotADirectoryError" in log
    assert "mlflow: MlflowException" in log
    assert [report.version for report in read_reports(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_torn_line_of_samples_is_read_when_it_is_whole(tmp_path):
    path, row = tmp_path / "samples.jsonl", json.dumps({"version": 2}) + "\n"
    rows = SampleRows(path)
    path.write_text(row + row[:5])
    assert rows.of(2) == [{"version": 2}]
    path.write_text(row * 2)
    assert rows.of(2) == [{"version": 2}]


def test_a_late_evaluation_has_its_own_version(tmp_path):
    process = Process(tmp_path / "run", []).steps(step(1), step(2))
    process.report.evaluation("held", 1, {"reward/mean": 0.5})
    process.finish()
    (report,) = [one for one in read_reports(Path(tmp_path / "run" / "metrics.jsonl")) if series_of(one)[0]]
    assert (series_of(report), report.version) == (("held", 1), 2)
    assert os.fspath(tmp_path)


def test_a_run_that_is_killed_and_resumed_has_every_step_once_in_every_tracker(tmp_path, own, slime, forked_slime):
    """By flags alone, without --plugin; the tracker that comes at the resume is no other experiment."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = (*own.flags, "--run-dir", tmp_path / "run", "--use-wandb", "--wandb-project", "p", "--use-trackio")
    killed = slime("run", *flags, SLIME_FAILPOINT="loop.reported:3=kill", **env)
    assert killed.returncode == -9, killed.stderr
    rmtree(tmp_path / "run" / "wandb")  # W&B's process dies too, and what it has on disk by then is chance
    resumed = forked_slime("run", "--resume", tmp_path / "run", "--use-tensorboard", **env)
    assert resumed.returncode == 0, resumed.stderr
    assert "failed; training continues" not in resumed.stderr
    assert json.loads((tmp_path / "run" / "trackers" / "trackio.json").read_text())["last"] == {"": 4}
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    rows, ids = wandb_rows(tmp_path)
    assert len(ids) == 1
    assert [row["_step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
