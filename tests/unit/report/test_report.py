"""The facade: everything reaches the files, secrets do not, and a sink that fails stops nothing."""

import asyncio
import io
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_cli.libraries import warnings_noted
from slime_cli.live import PlainLines, RichLine, make_live
from slime_core.config.load import load_config, read
from slime_core.config.schema import Config
from slime_core.report import Report, RunDir
from slime_core.report.progress import duration, figures
from slime_core.types import StepReport

pytestmark = pytest.mark.unit


class Keeping:
    """A sink that remembers."""

    def __init__(self):
        self.calls = []

    def start(self, run_dir, config):
        self.calls.append(("start", run_dir, config))

    def write(self, report):
        self.calls.append(("write", report))

    def close(self):
        self.calls.append(("close",))


class Failing(Keeping):
    """A sink that raises where it is told to."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def start(self, run_dir, config):
        super().start(run_dir, config)
        if self.where == "start":
            raise OSError("no network")

    def write(self, report):
        super().write(report)
        if self.where == "write":
            raise OSError("no network")


@pytest.fixture
def run_dir(tmp_path):
    with RunDir.create("demo", root=tmp_path) as made:
        yield made


def step(version, **metrics):
    return StepReport(
        version=version, stage="main", step=version - 1, of=2, metrics=metrics, seconds={"train": 0.5, "rollout": 1.5}
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_of_the_metrics_file_has_stable_keys(run_dir):
    stream = io.StringIO()
    report = Report(run_dir, Config(), live=PlainLines(stream))
    report.start()
    report.evaluation("held", 0, {"reward/mean": 0.25, "samples": 8.0, "seconds": 3.0})
    report.step(step(1, **{"reward/mean": 0.5, "a": float("nan")}))
    assert len(lines(run_dir.metrics)) == 2, "a line is flushed when it is written"
    report.finish()
    assert lines(run_dir.metrics) == [
        {
            "kind": "eval",
            "version": 0,
            "name": "held",
            "metrics": {"reward/mean": 0.25, "samples": 8.0},
            "seconds": {"eval": 3.0},
        },
        {
            "kind": "step",
            "version": 1,
            "stage": "main",
            "step": 0,
            "of": 2,
            "metrics": {"a": None, "reward/mean": 0.5},
            "seconds": {"rollout": 1.5, "train": 0.5},
        },
    ]
    assert "main step 1/2" in stream.getvalue()
    assert "eval held at step 0: reward 0.250 over 8 samples" in stream.getvalue()


def test_what_is_in_no_part_of_a_step_is_told_beside_its_parts(run_dir, monkeypatch):
    """The parts then add up to the step; the first of a stage, and evaluations, are not counted."""
    now = iter([0.0, 0.0, 10.0, 13.0, 50.0, 52.0, 90.0, 93.0])
    clock = SimpleNamespace(
        monotonic=lambda: next(now), strftime=time.strftime, time=time.time
    )  # nobody else's, in other threads
    monkeypatch.setattr("slime_core.report.report.time", clock)
    sink = Keeping()
    report = Report(run_dir, Config(), [sink], PlainLines(io.StringIO()))
    report.start()

    def step(version, stage="main"):
        parts = {"rollout": 1.5, "train": 1.0}
        report.step(StepReport(version=version, stage=stage, step=version, of=9, metrics={}, seconds=parts))
        return parts

    step(1)
    assert step(2) == {"rollout": 1.5, "train": 1.0}
    report.evaluation("held", 2, {"reward/mean": 0.5})
    step(3)
    step(4, "next")
    step(5, "next")
    report.finish()
    found = [call[1].seconds.get("other") for call in sink.calls if call[0] == "write" and not call[1].metrics]
    assert found == [None, 0.5, 0.0, None, 0.5]


def test_the_resolved_config_is_written_and_loads_again(run_dir):
    config = Config(name="demo", seed=5)
    report = Report(run_dir, config, live=PlainLines(io.StringIO()))
    report.start()
    report.finish()
    assert load_config(run_dir.config) == config


def test_no_secret_reaches_any_file_or_sink(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "canary-from-environment")
    recipe = tmp_path / "r.toml"
    login = "me:canary-in-url"
    recipe.write_text(
        f'[plugin.judge]\napi_key = "canary-pasted"\nurl = "http://{login}@judge.example/"\n'
        'access = "${JUDGE_TOKEN}"\n'
    )
    loaded = read(recipe)
    sink = Keeping()
    report = Report(run_dir, loaded.config, [sink], PlainLines(io.StringIO()), secrets=loaded.secrets)
    report.start()
    report.step(step(1))
    report.finish()
    assert "canary-" not in str(sink.calls)
    for file in Path(run_dir.path).rglob("*"):
        assert not file.is_file() or b"canary-" not in file.read_bytes(), file


def test_a_sink_gets_steps_and_evaluations_as_reports(run_dir):
    sink = Keeping()
    report = Report(run_dir, Config(), [sink], PlainLines(io.StringIO()))
    report.start()
    report.step(step(1, x=1.0))
    report.evaluation("held", 1, {"reward/mean": 0.25, "seconds": 2.0})
    report.finish()
    kinds = [call[0] for call in sink.calls]
    assert kinds == ["start", "write", "write", "close"]
    evaluation = sink.calls[2][1]
    assert dict(evaluation.items()) == {"eval/held/reward/mean": 0.25, "time/eval/held": 2.0}
    assert (evaluation.version, evaluation.stage, evaluation.step) == (1, "main", 0)


def test_an_evaluation_that_ends_after_later_steps_is_told_of_its_version_and_leaves_their_time_whole(
    run_dir, monkeypatch
):
    """Trackers go forward only, so it stands at the last step there; in the file it stands at its own version."""
    now = iter([0.0, 0.0, 10.0, 13.0, 16.0])
    clock = SimpleNamespace(
        monotonic=lambda: next(now), strftime=time.strftime, time=time.time
    )  # nobody else's, in other threads
    monkeypatch.setattr("slime_core.report.report.time", clock)
    sink = Keeping()
    report = Report(run_dir, Config(), [sink], PlainLines(io.StringIO()))
    report.start()
    report.step(step(1))
    report.step(step(2))
    report.evaluation("held", 1, {"reward/mean": 0.25}, beside=True)
    report.step(step(3))
    report.finish()
    late, last = (call[1] for call in sink.calls[3:5])
    assert (late.version, late.metrics) == (2, {"eval/held/reward/mean": 0.25, "eval/held/version": 1.0})
    assert last.seconds["other"] == 1.0
    assert [(line["kind"], line["version"]) for line in lines(run_dir.metrics)] == [
        ("step", 1),
        ("step", 2),
        ("eval", 1),
        ("step", 3),
    ]


@pytest.mark.parametrize("where", ["start", "write"])
def test_a_failing_sink_is_named_once_left_out_and_stops_nothing(run_dir, where):
    stream, bad, good = io.StringIO(), Failing(where), Keeping()
    report = Report(run_dir, Config(), [bad, good], PlainLines(stream))
    report.start()
    report.step(step(1))
    report.step(step(2))
    report.finish()
    assert [call[0] for call in good.calls] == ["start", "write", "write", "close"]
    assert [call[0] for call in bad.calls] == (["start"] if where == "start" else ["start", "write"])
    assert stream.getvalue().count("Failing failed; training continues: OSError: no network") == 1
    assert "no network" in (run_dir.log / "run.log").read_text()
    assert len(lines(run_dir.metrics)) == 2


def test_a_metrics_file_that_cannot_be_written_stops_nothing(run_dir):
    run_dir.metrics.mkdir()
    stream = io.StringIO()
    report = Report(run_dir, Config(), live=PlainLines(stream))
    report.start()
    report.step(step(1))
    report.finish()
    assert "JsonlSink failed; training continues" in stream.getvalue()


def test_a_closed_terminal_stops_nothing(run_dir):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    report = Report(run_dir, Config(), live=PlainLines(Closed()))
    report.start()
    report.note("hello")
    report.step(step(1))
    report.finish()
    assert len(lines(run_dir.metrics)) == 1
    assert "hello" in (run_dir.log / "run.log").read_text()


def test_best_and_worst_samples_are_kept_each_step(run_dir, group):
    report = Report(run_dir, Config(), live=PlainLines(io.StringIO()))
    report.samples(1, [group(0, [1.0, 0.0, 0.5], [1, 1, 1])])
    rows = lines(run_dir.samples)
    assert [(row["rank"], row["reward"]) for row in rows] == [("best", 1.0), ("best", 0.5), ("worst", 0.0)]


def test_a_plain_line_has_reward_length_speed_and_time_left():
    stream = io.StringIO()
    live = PlainLines(stream)
    live.start(Config.model_validate({"rollout": {"num_rollout": 3}}), Path("x"))
    metrics = {"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0, "response_len/mean": 7.0}
    metrics |= {"tokens/response": 100.0, "rollout/dropped_samples": 2.0, "truncated_ratio": 0.25}
    live.starting("loading")
    live.step(step(1, **metrics), 2.0)
    assert stream.getvalue() == (
        "start: loading\nmain step 1/2  reward 0.500  len 7  truncated 25%  dropped 2  tok/s 50  eta 4s\n"
    )


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        pytest.param({"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0}, [], id="a supervised step"),
        pytest.param(
            {"reward/mean": 0.0, "reward/equal_groups": 1.0}, ["reward 0.000 (all groups equal)"], id="equal"
        ),
        pytest.param({"reward/mean": 0.25, "reward/equal_groups": 0.5}, ["reward 0.250"], id="mixed"),
        pytest.param({"loss": 1.0, "truncated_ratio": 0.004}, ["loss 1.0000"], id="what rounds to 0 % is left out"),
        pytest.param(
            {"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0, "loss": 0.0, "entropy": 0.81, "grad_norm": 1.5},
            ["reward 0.500", "entropy 0.81", "grad 1.50"],
            id="a loss of 0 by construction is left out",
        ),
        pytest.param(
            {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "loss": 2.0, "grad_norm": 1.5},
            ["loss 2.0000", "grad 1.50"],
            id="a supervised step with its loss",
        ),
    ],
)
def test_a_step_shows_the_reward_that_says_something(metrics, text):
    assert figures(step(1, **metrics), 0.0) == text


def test_the_reward_is_shown_with_how_it_moved_within_its_stage():
    stream = io.StringIO()
    live = PlainLines(stream)
    live.start(Config.model_validate({"rollout": {"num_rollout": 9}}), Path("x"))
    for number, reward in enumerate([0.0, 0.25, 0.5, 0.75], start=1):
        live.step(step(number, **{"reward/mean": reward, "reward/min": 0.0, "reward/max": 1.0}), 1.0)
    # (0.5 + 0.75) / 2 - (0.0 + 0.25) / 2 = 0.5; three steps are too few
    shown = [line.split("reward ")[1].split("  ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["0.000", "0.250", "0.500", "0.750 (+0.500)"]


def test_the_start_says_what_it_is_busy_with_until_the_first_step(run_dir):
    stream = io.StringIO()
    report = Report(run_dir, Config(), live=PlainLines(stream))
    report.start()
    report.starting("checking the engine")
    report.phase("rollout")
    report.step(step(1))
    report.phase("rollout")
    report.finish()
    assert [line for line in stream.getvalue().splitlines() if line.startswith("start")] == [
        "start: checking the engine",
        "start: first step: rollout",
    ]


def test_a_phase_that_goes_on_is_said_once_a_minute_with_how_far_it_is():
    stream = io.StringIO()
    live = PlainLines(stream)
    for seconds in (5.0, 55.0, 60.0, 100.0, 121.0, 5.0, 61.0):
        live.waiting("rollout", seconds, "2 of 8 prompts finished" if seconds < 100 else "")
    assert stream.getvalue().splitlines() == [
        "rollout: 2 of 8 prompts finished, 1m00 so far",
        "rollout: 2m01 so far",
        "rollout: 2 of 8 prompts finished, 1m01 so far",
    ]


def test_a_report_shows_what_goes_on_until_it_ends(run_dir, monkeypatch):
    class Waiting(PlainLines):
        shown = asyncio.Event()

        def waiting(self, phase, seconds, progress):
            lines.append((phase, progress))
            self.shown.set()

    async def work():
        report = Report(run_dir, Config(), live=Waiting(io.StringIO()))
        async with asyncio.timeout(10), report.watched_live():
            with report.during("evaluating", lambda: "1 of 2 questions"):
                await Waiting.shown.wait()
        return report.doing[0]

    lines: list[tuple[str, str]] = []
    monkeypatch.setattr("slime_core.report.report.LONG", 0.01)
    assert asyncio.run(work()) == ""
    assert lines[0] == ("evaluating", "1 of 2 questions")


def test_a_warning_of_a_library_is_one_note_and_whole_in_the_log(run_dir, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # whatever another test has turned off
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.WARNING)
    report = Report(run_dir, Config(), live=PlainLines(stream))
    logger = logging.getLogger("transformers.of_this_test")
    with warnings_noted(report):
        for _ in range(2):
            logger.warning("Ignoring clean_up_tokenization_spaces\nfor BPE tokenizers")
    logger.warning("after the run")
    assert stream.getvalue() == "transformers: Ignoring clean_up_tokenization_spaces\n"
    assert (run_dir.log / "run.log").read_text().count("for BPE tokenizers") == 1


def test_a_terminal_gets_a_live_line_and_notes_above_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    live = make_live(stream)
    assert isinstance(live, RichLine)
    live.start(Config.model_validate({"rollout": {"num_rollout": 2}}), Path("x"))
    live.starting("checking the engine")
    live._progress.refresh()
    live.waiting("rollout", 75.0, "2 of 8 prompts finished")
    live._progress.refresh()
    live.note("a [bold]note[/bold] \x1b[2J")
    live.step(step(1, **{"reward/mean": 0.5}), 1.0)
    live.evaluation("held", 1, {"reward/mean": 0.5, "samples": 3.0})
    live.close()
    text = stream.getvalue()
    assert "a [bold]note[/bold] \\x1b[2J" in text
    assert "start: checking the engine" in text
    assert "rollout 1m15, 2 of 8 prompts finished" in text
    assert "main step 1/2" in text
    assert "eval held at step 1" in text


def test_elsewhere_there_are_plain_lines():
    assert isinstance(make_live(io.StringIO()), PlainLines)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00"), (3599, "59m59"), (7260, "2h01")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
