"""The audit and the conservation law: each kind of damage is told, and a sound ledger has none."""

import asyncio
import sqlite3

import pytest

from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger, conservation
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


@pytest.fixture
def full(tmp_path):
    """A ledger with something in every table; closed."""

    async def body():
        ledger = SqliteLedger(tmp_path)
        groups = [sample_group(i) for i in range(6)]
        await ledger.issue(groups)
        await ledger.suspend({"main/5-0": suspended_turns("main/5-0")})
        for group in groups[:4]:
            await ledger.finish(group)
        await ledger.journal_step(1, "main", ["main/0-0", "main/0-1"])
        await ledger.trained(1, "f1")
        await ledger.journal_step(2, "main", ["main/1-0", "main/1-1"])
        await ledger.drop([(groups[4].samples, Drop(reason="x"))])
        assert await audit(ledger) == []
        await ledger.rewind(0)
        assert await audit(ledger) == []
        await ledger.trained(1, "f1")
        await ledger.close()

    asyncio.run(body())
    return tmp_path


def audited(folder):
    async def body():
        ledger = SqliteLedger(folder)
        try:
            return await audit(ledger)
        finally:
            await ledger.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("UPDATE tally SET count = count + 1 WHERE state = 2", "tally and rows"),
        ("DELETE FROM tally WHERE state = 3", "samples were lost or doubled"),
        ("UPDATE samples SET state = 1 WHERE id = 'main/0-0'", "state and step"),
        ("UPDATE samples SET state = 2 WHERE id = 'main/1-0'", "state and step"),
        ("UPDATE samples SET step = 2 WHERE id = 'main/0-0'", "journaled for another step"),
        ("UPDATE samples SET state = 2 WHERE id = 'main/5-0'", "trained, and in no step"),
        ("INSERT INTO members SELECT 2, 9, serial FROM samples WHERE id = 'main/0-0'", "in two steps"),
        ("DELETE FROM members WHERE version = 2 AND place = 1", "in a step that is not complete"),
        ("UPDATE samples SET segment = NULL WHERE id = 'main/3-0'", "finished, without a payload"),
        ("UPDATE samples SET segment = 1 WHERE id = 'main/5-0'", "pending, with a payload"),
        ("UPDATE samples SET reason = 0 WHERE id = 'main/4-0'", "dropped without a reason"),
        ("UPDATE samples SET crc32 = 5 WHERE id = 'main/3-0'", "the payload of main/3-0 cannot be read"),
        ("UPDATE turns SET length = length - 1", "the turns of main/5-0 cannot be read"),
        ("INSERT INTO turns VALUES (999, 1, 24, 1, 1)", "references"),
        (
            "INSERT INTO samples (id, attempt, state) VALUES ('main/5-0', 1, 0)",
            "several open attempts",
        ),
    ],
    ids=lambda value: value.replace(" ", "_")[:40],
)
def test_damage_is_told(full, damage, told):
    assert audited(full) == []
    db = sqlite3.connect(full / "ledger.sqlite")
    db.execute(damage)
    db.commit()
    db.close()
    found = audited(full)
    assert any(told in line for line in found), found


def test_a_payload_that_was_changed_is_told(full):
    path = full / "segments" / "000001.seg"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert any("cannot be read" in line for line in audited(full))


def test_counts_that_add_up_are_one_line():
    counts = {"issued": 24, "trained": 18, "pending": 2, "dropped/equal_rewards": 3, "dropped/failed": 1}
    assert conservation(counts) == "24 issued = 18 trained + 4 dropped + 2 pending"


@pytest.mark.parametrize(
    "counts",
    [
        {"issued": 3, "trained": 1, "pending": 1},
        {"issued": 1, "trained": 1, "pending": 1},
        {"issued": 1, "trained": 2, "pending": -1},
        {"issued": 1, "trained": 0, "pending": 0, "dropped/x": 2},
    ],
)
def test_counts_that_do_not_add_up_are_an_error_with_the_counts(counts):
    with pytest.raises(StorageError) as caught:
        conservation(counts)
    assert caught.value.code == "STO00"
    assert str(counts["issued"]) in caught.value.what
    assert "issued = trained + dropped + pending" in caught.value.why
