"""What is said of steps that change nothing, are not finite, or whose ratios overflow: once, and with the reason."""

import pytest

from slime_core.report import Report, RunDir
from slime_core.report.alarms import Alarms
from slime_core.types import StepReport

pytestmark = pytest.mark.unit


def step(version=1, **metrics):
    named = {name.replace("__", "/"): float(value) for name, value in metrics.items()}
    return StepReport(version=version, stage="main", step=version - 1, of=99, metrics=named, seconds={})


def skipped(reason, count=1, **metrics):
    return step(optimizer_steps=0, skipped_steps=count, **{f"skipped_steps__{reason}": count}, **metrics)


def made(**metrics):
    return step(optimizer_steps=1, skipped_steps=0, **metrics)


def test_the_fifth_step_in_a_row_that_changes_nothing_is_explained():
    alarms, equal = Alarms(), skipped("no_gradient", reward__min=0.25, reward__max=0.25)
    assert [alarms.see(equal) for _ in range(4)] == [[]] * 4
    (line,) = alarms.see(equal)
    assert "5 optimizer steps in a row changed no weight" in line
    assert "rewards of each group are all equal" in line
    assert "0.25" in line


def test_an_alarm_is_repeated_after_ten_twenty_and_forty_steps():
    alarms = Alarms()
    said = [n for n in range(1, 81) if alarms.see(skipped("masked"))]
    assert said == [5, 10, 20, 40, 80]


def test_a_step_that_changes_a_weight_starts_again():
    alarms = Alarms()
    for _ in range(3):
        assert [alarms.see(skipped("masked")) for _ in range(4)] == [[]] * 4
        assert alarms.see(made()) == []


def test_several_optimizer_steps_of_a_rollout_count_each():
    alarms = Alarms()
    assert alarms.see(skipped("masked", 3)) == []
    (line,) = alarms.see(skipped("masked", 3))
    assert "6 optimizer steps" in line
    assert "masked" in line


def test_the_commonest_reason_is_named():
    alarms = Alarms()
    lines = [alarms.see(skipped(reason)) for reason in ("masked", "no_gradient", "masked", "masked", "no_gradient")]
    assert "masked" in lines[-1][0]


def test_steps_of_the_critic_alone_are_no_alarm():
    alarms = Alarms()
    assert [alarms.see(step(optimizer_steps=0, skipped_steps=0, critic_only_steps=1)) for _ in range(9)] == [[]] * 9


def test_every_step_that_is_not_finite_is_told_with_the_place_of_its_samples():
    alarms = Alarms()
    for version in (3, 4):
        both = step(version, optimizer_steps=1, skipped_steps=1, skipped_steps__nonfinite=1)
        (line,) = alarms.see(both)
        assert f"version {version}" in line
        assert "errors/nonfinite.jsonl" in line


def test_overflowing_ratios_are_told_when_they_begin():
    alarms = Alarms()
    told = [bool(alarms.see(made(ratio_overflow=share))) for share in (0, 0.01, 0.02, 0, 0.5)]
    assert told == [False, True, False, False, True]


def test_a_report_writes_alarms_to_the_log(tmp_path):
    from slime_core.config.load import load_config

    with RunDir.create("demo", root=tmp_path) as run_dir:
        report = Report(run_dir, load_config(None))
        report.start()
        for _ in range(5):
            report.step(skipped("masked"))
        report.finish()
        assert "changed no weight: every token is masked" in (run_dir.log / "run.log").read_text()
