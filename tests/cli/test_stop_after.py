"""`--stop-after`: times that are read, and when a run is asked to stop so that its checkpoint still fits."""

import pytest

from slime_cli.stop_after import REASON, StopAfter, parse_seconds
from slime_core.preemption import StopSignal
from slime_core.types import StepReport

pytestmark = pytest.mark.unit


def step(version, stage="main", **seconds):
    return StepReport(version=version, stage=stage, step=version - 1, of=99, metrics={"loss": 0.0}, seconds=seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40m", 2400),
        ("90s", 90),
        ("2h", 7200),
        ("1h30m", 5400),
        ("2400", 2400),
        ("1h2m3s", 3723),
        ("0.5", 0.5),
        *((text, None) for text in ("", "0", "m", "-5", "5d", "40 minutes", "1m1h", "nan")),
    ],
)
def test_times_are_read(text, seconds):
    assert parse_seconds(text) == seconds


class Times:
    """A clock that a test moves, for StopAfter outside an event loop."""

    def __init__(self, limit):
        self.now, self.stop = 0.0, StopSignal()
        self.sink = StopAfter(limit, self.stop, began=0.0, clock=lambda: self.now)
        self.sink.arm = lambda: None

    def step(self, version, wall, **seconds):
        self.now += wall
        self.sink.write(step(version, **seconds))
        return self.stop.reason


def test_a_run_is_asked_to_stop_where_another_step_and_a_checkpoint_do_not_fit():
    times = Times(limit=100)
    times.stop.checkpoint_seconds = 10.0
    while not times.step(1, 10.0, rollout=7.0, train=3.0):
        pass
    assert times.stop.reason == REASON
    assert times.now == 70, "a step is 10 s, the end 2 + 1.5 * (3 + 10)"
    assert times.now + 10.0 + times.sink.reserve > 100 >= times.now + times.sink.reserve


def test_setting_up_is_no_step():
    times = Times(limit=100)
    assert times.step(1, 60.0, rollout=1.0, train=1.0) == ""
    assert times.step(2, 2.0, rollout=1.0, train=1.0) == ""


def test_a_checkpoint_that_was_never_seen_is_taken_to_be_as_long_as_a_step():
    times = Times(limit=100)
    times.step(1, 4.0, rollout=1.0, train=3.0)
    assert times.sink.reserve == 2.0 + 1.5 * 6.0


def test_evaluations_are_no_steps():
    times = Times(limit=100)
    times.step(1, 10.0, rollout=7.0, train=3.0)
    times.now += 50
    times.sink.write(StepReport(version=1, stage="main", step=0, of=9, metrics={"eval/x/reward": 1.0}, seconds={}))
    assert times.stop.reason == ""
    assert times.step(2, 10.0, rollout=7.0, train=3.0) == REASON
