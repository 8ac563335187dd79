"""Pruning: payloads go, rows stay; a file is removed when nothing lives in it, and not a moment earlier."""

import asyncio

import numpy as np
import pytest

from durability.ledger_contract import suspended_turns
from slime_core import durable
from slime_core.durable import Disk
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.ledger.segments import Segments
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


def small_files(ledger):
    """A file a record."""
    ledger.segments._roll_bytes = 64


def numbers(ledger):
    return sorted(int(path.stem) for path in ledger.segments.folder.glob("*.seg"))


async def train(ledger, version, *positions):
    ids = [s.id for p in positions for s in sample_group(p).samples]
    await ledger.journal_step(version, "main", ids)
    await ledger.trained(version, f"f{version}")


async def finish(ledger, *positions):
    for position in positions:
        await ledger.issue([sample_group(position)])
        await ledger.finish(sample_group(position))


def test_files_in_which_nothing_lives_any_more_are_removed(with_ledger):
    async def body(ledger):
        small_files(ledger)
        await finish(ledger, 0, 1, 2)
        assert numbers(ledger) == [1, 2, 3, 4, 5, 6]
        await train(ledger, 1, 0)
        await ledger.samples(["main/0-0"])  # its file is open
        await ledger.prune(1)
        assert numbers(ledger) == [1, 2, 3, 4, 5, 6]
        await ledger.prune(2)
        assert numbers(ledger) == [3, 4, 5, 6]
        assert len(await ledger.samples(["main/1-0", "main/2-1"])) == 2
        with pytest.raises(StorageError, match="has no payload"):
            await ledger.samples(["main/0-0"])

    with_ledger(body)


def test_the_file_that_is_being_written_stays(with_ledger):
    async def body(ledger):
        await finish(ledger, 0)
        await ledger.drop([(sample_group(0).samples, Drop(reason="x"))])
        await ledger.prune(5)
        assert numbers(ledger) == [1]
        await finish(ledger, 1)
        assert len(await ledger.samples(["main/1-0"])) == 1

    with_ledger(body)


def test_a_group_that_was_dropped_lately_keeps_its_payload(with_ledger):
    """A step that is made again needs it: it was made by version 4."""
    group = sample_group(0)
    for sample in group.samples:
        sample.weight_versions = [3, 4, -1]

    async def body(ledger):
        await ledger.finish(group)
        await ledger.drop([(group.samples, Drop(reason="x"))])
        await ledger.prune(4)
        assert len((await ledger.groups(["main/0"]))["main/0"].samples) == 2
        await ledger.prune(5)
        assert (await ledger.groups(["main/0"]))["main/0"].samples == []

    with_ledger(body)


def test_suspended_turns_keep_their_file_until_their_sample_is_old(with_ledger):
    async def body(ledger):
        small_files(ledger)
        group = sample_group(0)
        await ledger.issue([group])
        await ledger.suspend({s.id: suspended_turns(s.id) for s in group.samples})
        await finish(ledger, 1)
        await ledger.prune(9)
        assert 1 in numbers(ledger)
        await ledger.finish(group)
        await train(ledger, 1, 0)
        await ledger.prune(1)
        assert len(await ledger.suspended(["main/0-0"], before=9)) == 1
        await ledger.prune(2)
        assert await ledger.suspended(["main/0-0"], before=9) == {}
        assert 1 not in numbers(ledger)

    with_ledger(body)


def test_arrays_keep_their_file_as_long_as_their_sample_lives(with_ledger, tmp_path):
    """Also those of samples that have not come to the ledger yet."""

    async def write(ledger):
        small_files(ledger)
        group = sample_group(0)
        for sample in group.samples:
            sample.rollout_routed_experts = ledger.segments.write_array(np.arange(40, dtype=np.int16))
        await finish(ledger, 1)
        await train(ledger, 1, 1)
        await ledger.prune(9)
        assert numbers(ledger)[:2] == [1, 2]
        await ledger.finish(group)

    async def later(ledger):
        (sample,) = await ledger.samples(["main/0-0"])
        await ledger.prune(9)
        assert ledger.segments.read_array(sample.rollout_routed_experts).sum() == 780
        await train(ledger, 2, 0)
        await ledger.prune(3)
        assert numbers(ledger) == []

    with_ledger(write)
    with_ledger(later)


def test_experts_in_memory_are_stored_with_their_sample_and_removed_with_it(with_ledger):
    """Each in a file of its own, in the process that wrote it."""

    async def body(ledger):
        small_files(ledger)
        group = sample_group(0)
        rows = np.arange(40, dtype=np.uint8).reshape(5, 4, 2)
        for sample in group.samples:
            sample.rollout_routed_experts = rows.copy()  # an array that samples share lies once
        await ledger.issue([group])
        await ledger.finish(group)
        stored = await ledger.samples([sample.id for sample in group.samples])
        assert stored == group.samples, "samples in memory refer to the same place"
        for sample in stored:
            np.testing.assert_array_equal(ledger.segments.read_array(sample.rollout_routed_experts), rows)
        await finish(ledger, 1)
        await train(ledger, 1, 0)
        await ledger.prune(2)
        assert numbers(ledger) == [5, 6]

    with_ledger(body)


def test_a_crash_between_rows_and_files_leaves_files_that_the_next_pruning_removes(with_ledger, monkeypatch):
    class Crash(Disk):
        def remove(self, path):
            raise OSError(5, "the machine went down")

    async def body(ledger):
        small_files(ledger)
        await finish(ledger, 0, 1)
        await train(ledger, 1, 0)
        monkeypatch.setattr(durable, "disk", Crash())
        with pytest.raises(StorageError) as caught:
            await ledger.prune(2)
        assert caught.value.code == "STO121"
        monkeypatch.undo()
        assert numbers(ledger) == [1, 2, 3, 4]
        await ledger.prune(2)
        assert numbers(ledger) == [3, 4]

    with_ledger(body)


def test_files_that_an_earlier_process_left_half_written_are_removed(with_ledger, tmp_path):
    asyncio.run(SqliteLedger(tmp_path).close())
    left = Segments(tmp_path / "segments")
    left.append([b"never committed"])
    left.close()

    async def body(ledger):
        await finish(ledger, 0)
        assert numbers(ledger) == [1, 2]
        await ledger.prune(0)
        assert numbers(ledger) == [2]

    with_ledger(body)


def test_the_file_of_another_writer_of_this_time_stays(with_ledger, tmp_path):
    async def body(ledger):
        other = Segments(tmp_path / "segments")
        other.append([b"on its way"])
        await finish(ledger, 0)
        await ledger.prune(9)
        assert numbers(ledger) == [1, 2]
        other.close()

    with_ledger(body)
