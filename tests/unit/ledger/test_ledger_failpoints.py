"""A process that dies at any durable boundary of the ledger: every call happened wholly or not at all."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

import slime_core.ledger
from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from slime_core import failpoints
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit

NAMES = [name for name in failpoints.NAMES if name.startswith("ledger.")]


def ids(*positions):
    return [sample.id for position in positions for sample in sample_group(position).samples]


def calls(ledger, number):
    """Every kind of call, in order; ``number`` is the round's."""
    first, version = 3 * number, 2 * number + 1
    groups = [sample_group(first + i) for i in range(3)]
    return {
        "issue": lambda: ledger.issue(groups),
        "suspend": lambda: ledger.suspend({f"main/{first}-0": suspended_turns("x")}),
        "finish": lambda: asyncio.gather(ledger.finish(groups[0]), ledger.finish(groups[1])),
        "drop": lambda: ledger.drop([(groups[2].samples, Drop(reason="x"))]),
        "journal": lambda: ledger.journal_step(version, "main", ids(first)),
        "trained": lambda: ledger.trained(version, f"f{number}"),
        "journal again": lambda: ledger.journal_step(version + 1, "main", ids(first + 1)),
        "trained again": lambda: ledger.trained(version + 1, f"g{number}"),
        "rewind": lambda: ledger.rewind(version),
        "forward": lambda: ledger.trained(version + 1, f"g{number}"),
        "prune": lambda: ledger.prune(number + 1),
    }


async def script(folder, told):
    """Two rounds; what was answered is told to the parent, a line each."""
    ledger = SqliteLedger(folder)
    ledger.segments._roll_bytes = 64
    for number in range(2):
        for name, call in calls(ledger, number).items():
            await call()
            os.write(told, f"{number} {name}\n".encode())
    await ledger.close()


def child(folder, failpoint):
    """Run the script in a process that dies at the failpoint; answers what it was told, and how it ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            failpoints.arm(failpoint)
            asyncio.run(script(folder, writer))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        lines = file.read().splitlines()
    return lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def look(folder):
    ledger = SqliteLedger(folder)
    try:
        return await audit(ledger), dict(await ledger.counts())
    finally:
        await ledger.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The script that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    lines, code = child(folder, "")
    assert (len(lines), code) == (22, 0)
    return lines, asyncio.run(look(folder))[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_kill_at_each_failpoint_leaves_a_ledger_that_goes_on(tmp_path, whole, name, nth):
    lines, code = child(tmp_path, f"{name}:{nth}=kill")
    assert code == -signal.SIGKILL, f"nobody passes {name} {nth} times"
    wrong, counts = asyncio.run(look(tmp_path))
    assert wrong == []
    assert counts["issued"] >= 6 * sum(line.endswith(" issue") for line in lines), "an answered call is gone"
    again, code = child(tmp_path, "")
    assert code == 0
    assert again == whole[0]
    wrong, end = asyncio.run(look(tmp_path))
    assert (wrong, end) == ([], whole[1])


def test_every_failpoint_of_the_ledger_is_written_in_its_code():
    text = "".join(path.read_text() for path in Path(slime_core.ledger.__path__[0]).glob("*.py"))
    assert [name for name in NAMES if f'"{name}"' not in text] == []
