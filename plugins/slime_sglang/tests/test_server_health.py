"""When a server counts as hung or gone, and how often it is started again: no processes, no clock."""

import pytest

from slime_sglang.http import ServerFault
from slime_sglang.server_health import LONGEST_PAUSE, REFUSALS, RestartPolicy, ServerHealth, ServerStatus, WatchLimits

pytestmark = pytest.mark.unit


LIMITS = WatchLimits(interval=5.0, timeout=20.0)


# -- ServerHealth: checks in, a fault or nothing out


def judged(looks, limits=LIMITS):
    """The fault after these looks, one every five seconds; and how many looks it took."""
    health = ServerHealth(limits)
    for count, look in enumerate(looks, 1):
        given = {"at": 5.0 * count, "in_flight": 1, "came": 0, **look}
        one = given.pop("in_flight"), given.pop("came")
        if (failed := health.judge(ServerStatus(**{"ranks": (one,), **given}))) is not None:
            return failed, count
    return None, len(looks)


def test_requests_without_a_new_token_are_a_hung_server():
    """It answers, and nothing comes."""
    failed, looks = judged([{"came": 7, "cached_tokens": (100,)}] * 10)
    assert failed.code == "ENG85"
    assert isinstance(failed, ServerFault)
    assert "20 s with 1 requests" in failed.what
    assert looks == 5  # four intervals


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([{"came": n} for n in range(20)], id="tokens come back"),
        pytest.param(
            [{"cached_tokens": (100 + n,)} for n in range(20)], id="the server's cache grows: nothing came back yet"
        ),
        pytest.param([{"cached_tokens": (100, 7 + n)} for n in range(20)], id="ranks are not told apart: one goes on"),
        pytest.param([{"in_flight": 0}] * 20, id="nothing is asked of it"),
        pytest.param([{"expected": False}] * 20, id="it is paused"),
        pytest.param([{}, {}, {}, {"came": 1}] * 5, id="slow, but not still for so long"),
        pytest.param([{}, {}, {}, {"in_flight": 0}] * 5, id="idle between requests"),
        pytest.param([{}, {}, {}, {"expected": False}] * 5, id="paused between"),
    ],
)
def test_a_server_that_goes_on_or_has_nothing_to_do_is_healthy(looks):
    assert judged(looks)[0] is None


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([{"ranks": ((2, n), (3, 7))} for n in range(20)], id="tokens of the other come back"),
        pytest.param(
            [{"ranks": ((2, 0), (3, 7)), "cached_tokens": (n, 50)} for n in range(20)], id="the other's cache grows"
        ),
        pytest.param(
            [{"ranks": ((0, 0), (3, 7)), "cached_tokens": (n, 50)} for n in range(20)], id="the other is idle"
        ),
    ],
)
def test_a_data_parallel_rank_that_hangs_is_seen_beside_one_that_goes_on(looks):
    """Ranks are told apart."""
    failed, count = judged(looks)
    assert failed.code == "ENG85"
    assert "with 3 requests in flight at data-parallel rank 1" in failed.what
    assert count == 5


def test_ranks_that_all_go_on_are_healthy():
    looks = [{"ranks": ((2, n // 3), (3, n // 2), (0, 0)), "cached_tokens": (5, n, 0)} for n in range(40)]
    assert judged(looks)[0] is None


def test_refused_connections_of_a_server_whose_tokens_come_are_no_failure():
    assert judged([{"refused": True, "came": n} for n in range(20)])[0] is None


def test_a_look_without_an_answer_is_no_progress():
    """A scheduler that hangs does not answer /v1/loads either, or answers the same now and then."""
    failed, _ = judged([{"cached_tokens": (100,)}, {"cached_tokens": ()}] * 5)
    assert failed.code == "ENG85"


def test_progress_that_an_unanswered_look_hid_counts_at_the_next():
    looks = [{"cached_tokens": (100 + 10 * (n // 2),) if n % 2 == 0 else ()} for n in range(20)]
    assert judged(looks)[0] is None


def test_a_request_that_arrives_at_an_idle_server_has_the_whole_time():
    failed, looks = judged([{"in_flight": 0}] * 50 + [{}] * 10)
    assert failed is not None
    assert looks == 50 + 5


def test_ten_minutes_in_which_we_were_stopped_are_not_held_against_the_server():
    """SIGSTOP of ourselves; the clock goes on, and no look was made."""
    assert judged([{"at": 5.0}, {"at": 10.0}, {"at": 610.0}])[0] is None
    failed, looks = judged([{"at": 5.0}, {"at": 10.0}] + [{"at": 610.0 + 5 * n} for n in range(9)])
    assert failed is not None  # and it hung: the gap counts as one interval
    assert looks == 5


def test_refused_connections_are_a_failure_after_some():
    failed, looks = judged([{"refused": True, "in_flight": 0}] * 10)
    assert failed.code == "ENG69"
    assert looks == REFUSALS
    assert judged([{"refused": True}, {"refused": True}, {}] * 3, WatchLimits(interval=5.0, timeout=1e6))[0] is None


# -- RestartPolicy: states and the budget


def test_a_server_is_restarted_as_often_as_its_budget_says_and_then_retired():
    """The budget is of the whole run."""
    policy = RestartPolicy(max_restarts=2)
    seen = [policy.state]
    for again in (True, True, False):
        policy.fence()
        seen.append(policy.state)
        assert policy.next() is again
        seen.append(policy.state)
        if again:
            policy.up()
            seen.append(policy.state)
    assert seen == ["healthy", "fenced", "starting", "healthy", "fenced", "starting", "healthy", "fenced", "retired"]
    assert not policy.usable
    assert not policy.next()  # for good
    assert policy.restarts == 2


def test_pauses_before_restarts_grow_and_have_an_end():
    policy = RestartPolicy(max_restarts=100)
    pauses = []
    while policy.next():
        pauses.append(policy.pause(5.0))
        policy.fence()
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert max(pauses) == LONGEST_PAUSE
