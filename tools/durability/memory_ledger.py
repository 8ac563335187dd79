"""The ledger's rules without its disk: a model to compare the real one with, and a quick one for other rooms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

from slime_core.errors import StorageError
from slime_core.ledger.codec import cut
from slime_core.protocols import Drops, GroupRecord, RequestTurn
from slime_core.types import Batch, Group, Prompt, Sample

ORDER: tuple[Literal["pending", "trained", "finished", "dropped"], ...] = ("pending", "trained", "finished", "dropped")


@dataclass(slots=True)
class Row:
    """One sample and attempt of the :class:`MemoryLedger`."""

    state: Literal["pending", "finished", "trained", "dropped"]
    sample: Sample
    prompt: str
    reason: str = ""
    place: int = 0
    step: int | None = None
    turns: list[RequestTurn] = field(default_factory=list)
    stored: bool = False  # its payload


@dataclass(slots=True)
class MemoryLedger:
    """`protocols.Ledger` in memory; ``rows`` has the latest attempt of each sample, ``older`` the others."""

    rows: dict[str, Row] = field(default_factory=dict)
    older: list[Row] = field(default_factory=list)
    journals: dict[int, list[str]] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)  # version -> fingerprint, where the step has trained
    fingerprints: dict[int, str] = field(default_factory=dict)

    async def issue(self, groups: Sequence[Group]) -> None:
        """See `protocols.Ledger`."""
        new = [(sample, group.prompt.id) for group in groups for sample in group.samples if self._is_new(sample)]
        earlier = [(name, row) for sample, _ in new for name, row in self._earlier(sample)]
        for name, row in earlier:
            self._require_open(name, row, "issued again")
        for name, row in earlier:
            if row.state != "dropped":
                self._drop(row, "restarted")
            self.older.append(self.rows.pop(name))
        for sample, prompt in new:
            self.rows[sample.id] = Row("pending", deepcopy(sample), prompt)

    async def finish(self, group: Group, drops: Drops = ()) -> None:
        """See `protocols.Ledger`."""
        known = {sample.id: self._known(sample) for sample in group.samples}
        dropping = {sample.id for samples, _ in drops for sample in samples}
        gone = [name for name, row in known.items() if (row and row.state == "dropped") or name in dropping]
        if gone:
            raise StorageError(f"samples {gone[:3]} are dropped and cannot be finished")
        await self.drop(drops)
        for place, sample in enumerate(group.samples):
            row = self._row(sample, group.prompt)
            if row.state == "pending":
                row.state, row.sample, row.place, row.stored = "finished", deepcopy(sample), place, True
        kept = {sample.id for sample in group.samples}
        for name, row in self.rows.items():
            if row.prompt == group.prompt.id and row.state == "pending" and name not in kept:
                self._drop(row, "replaced")

    async def drop(self, drops: Drops) -> None:
        """See `protocols.Ledger`."""
        wanted = [(sample, drop.reason) for samples, drop in drops for sample in samples]
        for sample, _ in wanted:
            if (known := self._known(sample)) is not None:
                self._require_open(sample.id, known, "dropped")
        for place, (sample, reason) in enumerate(wanted):
            row = self._row(sample, None)
            if row.state == "pending":
                row.sample = deepcopy(sample)
            if row.state != "dropped":
                row.place = place
                self._drop(row, reason)

    async def groups(self, prompt_ids: Sequence[str]) -> dict[str, GroupRecord]:
        """See `protocols.Ledger`."""
        groups = {name: [row for row in self.rows.values() if row.prompt == name] for name in prompt_ids}
        return {name: self._group_record(rows) for name, rows in groups.items() if rows}

    async def suspend(self, turns: Mapping[str, Sequence[RequestTurn]]) -> None:
        """See `protocols.Ledger`."""
        unknown = [name for name in turns if name not in self.rows]
        if unknown:
            raise StorageError(f"sample {unknown[0]} is unknown and cannot be suspended")
        for name, kept in turns.items():
            if self.rows[name].state == "pending":
                self.rows[name].turns = deepcopy(list(kept))

    async def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[RequestTurn]]:
        """See `protocols.Ledger`."""
        kept = {name: cut(self.rows[name].turns, before) for name in ids if name in self.rows}
        return {name: deepcopy(turns) for name, turns in kept.items() if turns}

    async def rewind(self, version: int) -> None:
        """See `protocols.Ledger`."""
        names = [name for made, ids in self.journals.items() if made > version for name in ids]
        if any(not self.rows[name].stored for name in names):
            raise StorageError(f"samples that trained after version {version} have no payload")
        for later in [made for made in self.made if made > version]:
            del self.made[later]
            for name in self.journals[later]:
                self.rows[name].state = "finished"

    async def journal(self, batch: Batch) -> None:
        """See `protocols.Ledger`."""
        version, ids = batch.version + 1, list(batch.sample_ids)
        if version in self.journals:
            if self.journals[version] != ids:
                raise StorageError(f"version {version} is journaled with another composition")
            return
        rows = [self.rows.get(name) for name in ids]
        unfit = [name for name, row in zip(ids, rows, strict=True) if not row or row.state != "finished" or row.step]
        if unfit or len(set(ids)) != len(ids):
            raise StorageError(f"samples {unfit[:3]} are not finished, or belong to another step, and cannot train")
        self.journals[version] = ids
        for name in ids:
            self.rows[name].step = version

    async def trained(self, version: int, fingerprint: str = "") -> None:
        """See `protocols.Ledger`."""
        if version not in self.journals:
            raise StorageError(f"version {version} was never journaled")
        before = self.fingerprints.get(version, "")
        if before and fingerprint and before != fingerprint:
            raise StorageError(f"version {version} was made again with other weights: {fingerprint}, not {before}")
        if version in self.made:
            return
        self.made[version] = self.fingerprints[version] = fingerprint or before
        for name in self.journals[version]:
            self.rows[name].state = "trained"

    async def composition(self, version: int) -> list[str]:
        """See `protocols.Ledger`."""
        return list(self.journals.get(version, []))

    async def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`."""
        missing = [name for name in ids if name not in self.rows or not self.rows[name].stored]
        if missing:
            raise StorageError(f"sample {missing[0]} has no payload")
        return [deepcopy(self.rows[name].sample) for name in ids]

    async def prune(self, before_version: int) -> None:
        """See `protocols.Ledger`."""
        for row in [*self.rows.values(), *self.older]:
            newest = max(row.sample.weight_versions, default=-1)
            last = {"trained": row.step or 0, "dropped": newest}.get(row.state, before_version)
            if last < before_version:
                row.stored, row.turns = False, []

    async def counts(self) -> Mapping[str, int]:
        """See `protocols.Ledger`."""
        rows = [*self.rows.values(), *self.older]
        states = Counter(row.state for row in rows)
        reasons = Counter(f"dropped/{row.reason}" for row in rows if row.state == "dropped")
        pending = states["pending"] + states["finished"]
        return {"issued": len(rows), "trained": states["trained"], "pending": pending, **reasons}

    async def close(self) -> None:
        """See `protocols.Ledger`."""

    def _known(self, sample: Sample) -> Row | None:
        rows = [row for row in (*self.rows.values(), *self.older) if row.sample.id == sample.id]
        return next((row for row in rows if row.sample.attempt == sample.attempt), None)

    def _row(self, sample: Sample, prompt: Prompt | None) -> Row:
        name = prompt.id if prompt is not None else sample.id.rpartition("-")[0]
        known = self._known(sample)
        return known or self.rows.setdefault(sample.id, Row("pending", deepcopy(sample), name))

    def _is_new(self, sample: Sample) -> bool:
        row = self.rows.get(sample.id)
        return row is None or row.sample.attempt < sample.attempt

    def _earlier(self, sample: Sample) -> list[tuple[str, Row]]:
        """Earlier attempts, fan-out siblings too."""
        own = [(n, row) for n, row in self.rows.items() if n == sample.id or n.startswith(f"{sample.id}.")]
        return [(n, row) for n, row in own if row.sample.attempt < sample.attempt]

    def _require_open(self, name: str, row: Row, wanted: str) -> None:
        if row.state == "trained" or (row.state == "finished" and row.step is not None):
            state = "trained" if row.state == "trained" else f"journaled for version {row.step}"
            raise StorageError(f"sample {name} is {state} and cannot be {wanted}")

    def _drop(self, row: Row, reason: str) -> None:
        row.state, row.reason = "dropped", reason

    def _group_record(self, rows: Iterable[Row]) -> GroupRecord:
        rows = sorted(rows, key=lambda row: row.place)
        state = next(state for state in ORDER if any(row.state == state for row in rows))
        kept = [row for row in rows if row.state == state and row.stored]
        dropped = [row for row in rows if row.state == "dropped" and row.reason != "replaced"]
        reasons = [row.reason for row in dropped]
        ended = [row for row in rows if row.state != "pending"]
        newest = max((v for row in ended for v in row.sample.weight_versions), default=-1)
        ticks = {row.sample.id: row.sample.weight_versions.count(newest) for row in ended if newest >= 0}
        return GroupRecord(
            state=state,
            attempt=max(row.sample.attempt for row in rows),
            version=max(row.step or 0 for row in rows if row.state == state) if state == "trained" else 0,
            samples=[deepcopy(row.sample) for row in kept if row.stored],
            drops=dict(Counter(row.reason for row in dropped if row not in kept)),
            last_reason=reasons[-1] if reasons else "",
            newest=newest,
            ticks={name: count for name, count in ticks.items() if count},
        )
