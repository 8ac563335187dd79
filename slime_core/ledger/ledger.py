"""The Data Buffer on disk: every sample of a run in exactly one state, SQLite for states, segment files for payloads.

    issue -> pending -> finish -> finished -> journal, trained -> trained
                |                    |
                `------ drop --------'--> dropped(reason)

A payload is durable before the commit that names it. Calls that wait together share a transaction (`ledger.commits`)
and are answered when it is durable. The event loop never waits for the disk, and a call that is repeated changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.durable import FileMark
from slime_core.errors import StorageError
from slime_core.failpoints import failpoint
from slime_core.ledger.commits import Commits, Points
from slime_core.ledger.rows import LedgerTables, forget_payloads, living, remove_segments
from slime_core.ledger.schema import copy_database, damaged, database_path, sweep_copies
from slime_core.ledger.segments import Segments
from slime_core.protocols import Drops, GroupRecord, RequestTurn
from slime_core.types import Batch, Group, Sample

ISSUE = Points(before="ledger.issue.before", after="ledger.issue.after")
FINISH = Points(written="ledger.finish.written", synced="ledger.finish.synced", after="ledger.finish.after")
DROP = Points(before="ledger.drop.before", after="ledger.drop.after")
SUSPEND = Points(before="ledger.suspend.before", after="ledger.suspend.after")
JOURNAL = Points(before="ledger.journal.before", after="ledger.journal.after")
TRAINED = Points(before="ledger.trained.before", after="ledger.trained.after")
PRUNE = Points(before="ledger.prune.before", after="ledger.prune.committed")
REWIND = Points(before="ledger.rewind.before", after="ledger.rewind.after")


class SqliteLedger:
    """The ledger of one run directory: ``ledger.sqlite`` and ``segments/``. Implements `protocols.Ledger`.

    With ``ledger_dir`` the database lies in a subfolder of that; segments stay in the run directory.

    Example:
        ledger = SqliteLedger(run_dir)
        await ledger.issue(groups)
        await ledger.finish(groups[0])
        assert (await ledger.counts())["issued"] == len(groups) * 8

    Raises:
        StorageError: STO110 not writable, STO113 another version's, STO116 another process holds it, STO117 damaged or
            gone, STO118 on a network file system.
    """

    def __init__(self, run_dir: Path, ledger_dir: Path | str = "") -> None:
        self.path = database_path(Path(run_dir), Path(ledger_dir) if ledger_dir else None)
        self.segments = Segments(Path(run_dir) / "segments")
        if not (self.path.exists() and self.path.stat().st_size) and self.segments.ended():
            raise damaged(self.path, "the ledger is gone", f"{self.segments.folder} has payloads that it named")
        self.commits = Commits(self.path, self.segments, lambda: self.rows.forget())
        sweep_copies(self.path)
        self.rows = LedgerTables(self.commits.db, self.segments, self.path)

    async def issue(self, groups: Sequence[Group]) -> None:
        """See `protocols.Ledger`. An earlier attempt of a sample that is still open becomes dropped(restarted).

        Raises:
            StorageError: a sample that has trained is issued again.
        """
        groups = list(groups)
        rows = sum(len(group.samples) for group in groups)
        await self.commits.run(lambda: self.rows.issue(groups), rows=rows, points=ISSUE)

    async def finish(self, group: Group, drops: Drops = ()) -> None:
        """See `protocols.Ledger`. Pending samples of the prompt that the group no longer has become dropped(replaced).

        Raises:
            StorageError: a sample of the group was dropped before; the disk failed.
            PluginError: PLG57, a field that JSON cannot hold.
        """
        rows = len(group.samples) + sum(len(samples) for samples, _ in drops)
        stored = await self.commits.run(lambda: self.rows.finish(group, drops), rows=rows, points=FINISH)
        for sample, fields in stored:
            for name, value in fields.items():
                setattr(sample, name, value)

    async def drop(self, drops: Drops) -> None:
        """See `protocols.Ledger`. Samples that were never issued are added; a dropped sample keeps its first reason.

        Raises:
            StorageError: a sample that has trained, or is journaled for a step.
        """
        rows = sum(len(samples) for samples, _ in drops)
        await self.commits.run(lambda: self.rows.drop(drops), rows=rows, points=DROP)

    async def groups(self, prompt_ids: Sequence[str]) -> dict[str, GroupRecord]:
        """See `protocols.Ledger`. Samples of a trained group whose payloads are pruned are left out.

        Raises:
            StorageError: STO111 or STO112, a segment that is gone or damaged.
        """
        ids = list(prompt_ids)
        return await self.commits.run(lambda: self.rows.groups(ids))

    async def suspend(self, turns: Mapping[str, Sequence[RequestTurn]]) -> None:
        """See `protocols.Ledger`. Samples that finished or were dropped meanwhile keep nothing.

        Raises:
            StorageError: a sample that was never issued; the disk failed.
        """
        turns_now = dict(turns)
        await self.commits.run(lambda: self.rows.suspend(turns_now), rows=len(turns_now), points=SUSPEND)

    async def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[RequestTurn]]:
        """See `protocols.Ledger`. Samples of which nothing is left are left out."""
        sample_ids = list(ids)
        return await self.commits.run(lambda: self.rows.suspended(sample_ids, before))

    async def rewind(self, version: int) -> None:
        """See `protocols.Ledger`.

        Raises:
            StorageError: payloads of later steps are pruned.
        """
        await self.commits.run(lambda: self.rows.rewind(version), points=REWIND)

    async def journal(self, batch: Batch) -> None:
        """See `protocols.Ledger`. The step makes version ``batch.version + 1``.

        Raises:
            StorageError: samples that are not finished or belong to another step, or another composition under the
                same version.
        """
        await self.journal_step(batch.version + 1, batch.stage, list(batch.sample_ids))

    async def journal_step(self, version: int, stage: str, ids: list[str]) -> None:
        """Like :meth:`journal`, from ids instead of a batch; ``version`` is the one that the step makes."""
        await self.commits.run(lambda: self.rows.journal(version, stage, ids), rows=len(ids), points=JOURNAL)

    async def trained(self, version: int, fingerprint: str = "") -> None:
        """See `protocols.Ledger`.

        Raises:
            StorageError: the version was never journaled, or was made before with another fingerprint.
        """
        await self.commits.run(lambda: self.rows.trained(version, fingerprint), points=TRAINED)

    async def composition(self, version: int) -> list[str]:
        """See `protocols.Ledger`."""
        return await self.commits.run(lambda: self.rows.composition(version))

    async def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`. The latest attempt of each id.

        Raises:
            StorageError: an id without a stored payload, STO111 or STO112 a segment that is gone or damaged.
        """
        sample_ids = list(ids)
        return await self.commits.run(lambda: self.rows.samples(sample_ids))

    async def prune(self, before_version: int) -> None:
        """See `protocols.Ledger`; segment files in which nothing lives any more are removed.

        Raises:
            StorageError: a file that cannot be removed.
        """
        db = self.commits.db
        await self.commits.run(lambda: forget_payloads(db, before_version), points=PRUNE)
        await self.commits.run(lambda: remove_segments(self.segments, living(db)))
        failpoint("ledger.prune.after")

    async def backup(self, path: Path) -> FileMark:
        """Copy the database, as it is committed now, into the new durable file ``path``; writers go on meanwhile.

        Raises:
            StorageError: ``path`` cannot be written.
        """
        return await asyncio.to_thread(copy_database, self.path, path)

    async def counts(self) -> Mapping[str, int]:
        """See `protocols.Ledger`. ``issued`` is the last serial (no row is ever deleted), the rest is the tally."""
        return await self.commits.run(self.rows.counts)

    async def close(self) -> None:
        """See `protocols.Ledger`. A second call does nothing."""
        await self.commits.close(self.segments.close)


def dropped_in(counts: Mapping[str, int]) -> int:
    """Samples of a ledger's counts that were dropped, whatever the reason."""
    return sum(count for name, count in counts.items() if name.startswith("dropped/"))


def conservation(counts: Mapping[str, int]) -> str:
    """A ledger's counts as one line: ``24 issued = 20 trained + 4 dropped + 0 pending``.

    Raises:
        StorageError: STO00 with the counts, where they do not add up.
    """
    dropped = dropped_in(counts)
    issued, trained, pending = counts["issued"], counts["trained"], counts["pending"]
    if issued != trained + dropped + pending or min(counts.values()) < 0:
        raise StorageError(
            f"samples were lost or doubled: {dict(counts)}",
            code="STO00",
            why=f"issued = trained + dropped + pending, here {issued} and {trained} + {dropped} + {pending}",
            fix="keep the run directory as it is and report this; slime show RUN_DIR shows the counts",
        )
    return f"{issued} issued = {trained} trained + {dropped} dropped + {pending} pending"
