"""When a run goes on by itself, and with what it gives up."""

import pytest

from slime_cli.restarts import Death, allowed, given_up, mendable, pause, refusal
from slime_core.config.schema import ClusterSection, Config
from slime_core.errors import ConfigError, EngineError, Hung, PluginError, TrainerError

pytestmark = pytest.mark.unit


def died(version, code="TRN105"):
    return Death(version=version, kind="TrainerError", error=TrainerError(f"at {version}", code=code).as_dict())


@pytest.mark.parametrize(
    ("versions", "limit", "reason"),
    [
        pytest.param([3], 1, "", id="first"),
        pytest.param([3], 0, "0 restart(s) were allowed", id="none allowed"),
        pytest.param([3, 4, 5], 3, "", id="each further than the one before"),
        pytest.param([3, 4, 5], 2, "2 restart(s) were allowed", id="too many"),
        pytest.param([3, 3], 9, "step 4 was not finished after the restart either", id="the same step twice"),
        pytest.param([3, 2], 9, "step 3 was not finished after the restart either", id="not even as far"),
    ],
)
def test_a_run_is_restarted_while_it_gets_further(versions, limit, reason):
    found = refusal([died(version) for version in versions], limit)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_no_room_after_a_machine_was_lost_is_no_lack_of_progress():
    assert refusal([died(3), died(3, "CFG18")], 2) == ""
    assert "1 restart(s) were allowed" in refusal([died(3), died(3, "CFG18")], 1)


def test_the_first_cause_is_told_first_and_the_last_beside_it():
    first = EngineError(
        "the engine's process 7 was killed", code="ENG84", where="engine-0.log", why="its log", fix="mend"
    )
    deaths = [Death.of(first, 3), died(4), died(4)]
    error = given_up(deaths, "so it was given up")
    assert type(error) is EngineError
    assert (error.what, error.code, error.where, error.fix) == (first.what, "ENG84", "engine-0.log", "mend")
    assert error.why.splitlines()[:4] == [
        "its log",
        "at version 3",
        "restart 1 ended with TRN105 at 4 (at version 4)",
        "restart 2 ended with TRN105 at 4 (at version 4)",
    ]
    assert error.why.endswith("so it was given up")


def test_only_what_was_lost_is_tried_again():
    assert mendable(TrainerError("gone", code="TRN105", lost=True))
    assert mendable(Hung("rank 1 is stopped"))
    for error in (
        TrainerError("loss is nan", code="TRN95"),
        TrainerError("ended after another failed", code="TRN105"),
        EngineError("other weights", code="ENG83"),
        PluginError("the reward raised"),
        ConfigError("no room", code="CFG18"),
    ):
        assert not mendable(error)


def test_pauses_grow_up_to_a_minute():
    assert [pause(number) for number in (1, 2, 3, 6, 20)] == [2, 4, 8, 60, 60]


def test_runs_on_ray_restart_by_themselves_and_others_when_asked():
    def config(**cluster):
        return Config(cluster=ClusterSection(**cluster))

    assert allowed(config()) == 0
    assert allowed(config(cluster_backend="ray")) == 3
    assert allowed(config(max_restarts=7)) == 7
    assert allowed(config(cluster_backend="ray", max_restarts=0)) == 0
