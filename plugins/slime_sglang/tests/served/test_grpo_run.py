"""`slime run` of rm_math's arithmetic with SGLang's servers: what it leaves, what a kill of any of its processes does.

The case of a killed server with requests in flight (84) is proven for the engine in `test_kill_and_recover.py`; here
for the ledger.
"""

from __future__ import annotations

import os
import signal

import pytest
from raw_server import START_TIMEOUT, RawServer
from served_run import SERVED, STEPS, WARMUP, Driver, Work, in_order, is_settled, served_samples

pytestmark = pytest.mark.system

TOKEN = "SLIME_SGLANG_TOKEN"


def test_a_run_through_a_server_that_runs_already(server: RawServer, work: Work, drivers: list[Driver]) -> None:
    token = server.server.address.token
    drivers.append(
        work.start(
            "--rollout-external-engine-addrs", server.server.address.url, "--check-weights", "all", **{TOKEN: token}
        )
    )
    ended = drivers[-1].wait(150)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert "Unclosed" not in ended.output, ended.output[-2000:]
    in_order(work)
    # On-policy: the step that makes version v trains on what version v - 1 sampled.
    assert served_samples(work, SERVED) == {version: {version - 1} for version in SERVED}
    for line in work.lines():
        canary = {name: value for name, value in line["metrics"].items() if name.startswith("canary/")}
        assert canary["canary/tensors"] == 18, canary
        assert canary["canary/logprob_diff_mean"] < canary["canary/band"]
    assert is_settled(server)
    assert server.ask("/model_info")["weight_version"].endswith(f".{STEPS}")
    assert list(work.temporary.iterdir()) == []
    assert token not in ended.output
    assert [path for path in work.run.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_whose_driver_and_then_whose_server_is_killed(work: Work, drivers: list[Driver]) -> None:
    """Nothing lost, nothing doubled, nothing left: the servers end with a driver that is killed, and come back in one
    that goes on."""
    drivers.append(work.start())
    first = drivers[-1]
    first.until(lambda: len(work.lines()) > WARMUP, "a step of the second stage", START_TIMEOUT + 120)
    first.look()
    assert first.scheduler()
    first.process.kill()
    ended = first.wait(30)
    assert ended.code == -signal.SIGKILL
    assert (ended.left, ended.shared) == ({}, set()), "a server outlived the driver"
    assert len(work.lines()) < STEPS

    drivers.append(work.start())
    second = drivers[-1]
    done = len(work.lines())
    second.until(lambda: len(work.lines()) > done, "a step of the resumed run", START_TIMEOUT + 120)
    os.kill(second.scheduler(), signal.SIGKILL)
    ended = second.wait(START_TIMEOUT + 120)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert "Unclosed" not in ended.output, ended.output[-2000:]
    in_order(work)
    made = served_samples(work, SERVED)
    assert all(versions == {version - 1} for version, versions in made.items()), made
    assert "restart 1 of 3" in ended.output
    assert list(work.temporary.iterdir()) == []
