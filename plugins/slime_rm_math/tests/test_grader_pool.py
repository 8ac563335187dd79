"""Grading workers: what a hostile answer, a signal or a bad label costs, and whom."""

import asyncio
import os
import re
import select
import signal
from pathlib import Path

import pytest

from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.pool import GraderPool
from slime_rm_math.graders.worker import refuse

pytestmark = pytest.mark.integration

HOSTILE = ("7", "(((2^{9999})^{9999})^{9999})^{9999}")  # passes for minutes and gigabytes
ORDINARY = (r"\frac{1}{2}", "0.5")


@pytest.fixture(scope="module")
def pool():
    with GraderPool(workers=1, seconds=1.0, memory_mb=512) as made:
        made.start()
        yield made


def test_the_worker_of_an_answer_that_takes_too_long_is_killed_and_the_next_answer_is_graded(pool):
    assert pool.ask(*ORDINARY).result().outcome == "right"
    (before,) = pool.processes()
    late = pool.ask(*HOSTILE).result(timeout=2.0)
    assert late.outcome in ("unparsable", "infra_error")  # the second where this machine gave the worker no time
    assert "1 s" in late.why
    assert not Path(f"/proc/{before}").exists()
    assert pool.ask(*ORDINARY).result().outcome == "right"


def test_a_worker_that_is_killed_costs_nobody_an_answer(pool):
    assert pool.ask(*ORDINARY).result().outcome == "right"
    (worker,) = pool.processes()
    os.kill(worker, signal.SIGKILL)
    assert [pool.ask(*ORDINARY).result().outcome, pool.ask("1", "2").result().outcome] == ["right", "wrong"]
    assert pool.processes() != [worker]


def test_a_label_that_cannot_be_read_in_time_is_not_the_answers_fault(pool):
    slow = "+".join(f"x_{{{n}}}" for n in range(800))
    found = pool.ask(slow, "7").result(timeout=2.0)
    assert found.outcome == "infra_error"
    assert pool.ask(*ORDINARY).result().outcome == "right"


def test_a_worker_has_no_more_memory_files_or_writes_than_it_needs(pool):
    assert pool.ask(*ORDINARY).result().outcome == "right"
    limits = Path(f"/proc/{pool.processes()[0]}/limits").read_text()
    found = {
        name: re.search(rf"{name} +(\d+) +(\d+)", limits).groups() for name in ("Max address space", "Max file size")
    }
    assert found == {"Max address space": (str(512 << 20),) * 2, "Max file size": ("0", "0")}


def test_workers_end_with_their_pool_and_with_their_parent():
    pool = GraderPool(workers=2, seconds=1.0, memory_mb=512)
    pool.start()
    pool.ask(*ORDINARY).result()
    parent, workers = pool._parent.pid, pool.processes()
    assert workers
    pool.close()
    assert not any(Path(f"/proc/{process}").exists() for process in (parent, *workers))


def test_without_the_parent_of_workers_nothing_is_judged_and_nothing_is_wrong():
    with GraderPool(workers=1, seconds=1.0, memory_mb=512) as pool:
        assert pool.ask(*ORDINARY).result().outcome == "right"
        ended = os.pidfd_open(pool.processes()[0])
        pool._parent.kill()
        pool._parent.wait()
        assert select.select([ended], [], [], 30.0)[0], "workers die with their parent"
        os.close(ended)
        found = pool.ask(*ORDINARY).result()
    assert (found.outcome, found.why[:17]) == ("infra_error", "no grading worker")


def test_an_answer_that_waits_too_long_for_a_worker_is_not_judged():
    equal = Equivalence(workers=1, seconds=1.0, memory_mb=512)
    equal.pool().start()

    async def both():
        slow = asyncio.ensure_future(equal.verdict(HOSTILE[1], "7"))
        await asyncio.sleep(0)
        return (await equal.verdict(*ORDINARY, within=0.05)).outcome, (await slow).outcome != "right"

    try:
        assert asyncio.run(both()) == ("infra_error", True)
    finally:
        equal.close()


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", ("/tmp/x", "w", os.O_WRONLY | os.O_CREAT)),
        ("open", ("/tmp/x", "a", 0)),
        ("open", ("/tmp/x", None, os.O_RDWR)),
        ("os.system", (b"true",)),
        ("subprocess.Popen", ("true", [], None, None)),
        ("socket.connect", (None, ("127.0.0.1", 1))),
        ("os.remove", ("/tmp/x", -1)),
        ("ctypes.dlopen", ("libc.so.6",)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_worker_refuses_what_changes_the_world(event, arguments):
    with pytest.raises(PermissionError, match="grading worker"):
        refuse(event, arguments)


@pytest.mark.parametrize("event", ["import", "compile", "exec", "sys._getframe"])
def test_a_worker_does_what_sympy_needs(event):
    refuse(event, ())
    refuse("open", ("/usr/lib/x.py", "rb", os.O_RDONLY))
