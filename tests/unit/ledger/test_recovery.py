"""Groups, drops and turns whose bytes are gone when a run goes on: named once, and asked for no more."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.ledger.repair import ResumePoint, recover
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


def plain_group(position):
    """A group whose samples name no arrays."""
    group = sample_group(position)
    for sample in group.samples:
        sample.rollout_routed_experts = sample.rollout_top_p_token_ids = sample.multimodal_train_inputs = None
    return group


async def fill(run):
    """A finished group, one that was dropped after it finished, a pending one with turns, and a whole one."""
    ledger = SqliteLedger(run)
    groups = [plain_group(position) for position in range(4)]
    await ledger.issue(groups)
    for group in groups[:2]:
        await ledger.finish(group)
    await ledger.drop([(groups[1].samples, Drop(reason="surplus"))])
    name = groups[2].samples[0].id
    await ledger.suspend({name: suspended_turns(name)})
    await ledger.close()
    ledger = SqliteLedger(run)  # another segment
    await ledger.finish(groups[3])
    await ledger.close()


async def look(run):
    ledger = SqliteLedger(run)
    try:
        known = await ledger.groups([f"main/{position}" for position in range(4)])
        states = [(known[name].state, len(known[name].samples)) for name in sorted(known)]
        suspended = await ledger.suspended([sample_group(2).samples[0].id], before=100)
        return await audit(ledger), dict(await ledger.counts()), states, suspended
    finally:
        await ledger.close()


def test_samples_of_a_segment_that_is_gone_are_pending_or_forgotten(tmp_path):
    asyncio.run(fill(tmp_path))
    assert recover(tmp_path, ResumePoint()) == []
    (tmp_path / "segments" / "000001.seg").unlink()
    damage, again = recover(tmp_path, ResumePoint())
    assert "DAMAGED SEGMENT" in damage
    assert "000001.seg: sample main/0-0 and 4 more cannot be read (STO111" in damage
    assert again == "1 groups are generated again"
    counts = {"issued": 8, "trained": 0, "pending": 6, "dropped/surplus": 2}
    states = [("pending", 0), ("dropped", 0), ("pending", 0), ("finished", 2)]
    assert asyncio.run(look(tmp_path)) == ([], counts, states, {})
    assert recover(tmp_path, ResumePoint()) == []


def test_groups_that_ended_before_the_checkpoint_are_not_read(tmp_path):
    asyncio.run(fill(tmp_path))
    data = bytearray((tmp_path / "segments" / "000001.seg").read_bytes())
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        (place,) = db.execute("SELECT offset FROM samples WHERE id = 'main/1-0'").fetchone()
    data[place] ^= 1
    (tmp_path / "segments" / "000001.seg").write_bytes(data)
    assert recover(tmp_path, ResumePoint(version=3, first=2)) == []
    assert len(recover(tmp_path, ResumePoint(version=3, first=1))) == 2


def test_a_ledger_that_knows_less_than_the_checkpoint_is_refused_where_there_is_no_copy(tmp_path):
    asyncio.run(fill(tmp_path))
    with pytest.raises(StorageError, match="STO117") as caught:
        recover(tmp_path, ResumePoint(version=3, issued=9))
    assert "it has 8 samples, the checkpoint was made with 9; checkpoint 3 has no copy of it" in caught.value.why
