"""The ledger through the life of a run: issue, complete, fail, suspend, train, checkpoint, crash, resume."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from durability.ledger_audit import audit
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.protocols import GroupRecord, RequestTurn
from slime_core.trainers.batch import make_batch
from slime_core.types import Completion, Drop, GenerateRequest, Group, Prompt, Sample, SamplingParams

N = 2  # samples a prompt
REASONS = ("equal_rewards", "over_sampled", "infra_error", "plugin_error")


@dataclass
class Row:
    """One sample and attempt, as the model has it."""

    id: str
    attempt: int
    state: str = "pending"
    reason: str = ""
    payload: Sample | None = None  # None: none was stored, or it is pruned
    place: int = -1
    newest: int = -1
    step: int = 0  # version for whose step it is journaled


@dataclass
class Model:
    """All rows in the order in which they were made, journals, weights, suspended turns."""

    rows: list[Row] = field(default_factory=list)
    by_position: dict[int, list[Row]] = field(default_factory=dict)
    journals: dict[int, list[str]] = field(default_factory=dict)
    fingerprints: dict[int, str] = field(default_factory=dict)
    turns: dict[str, list[RequestTurn]] = field(default_factory=dict)
    position: int = 0  # of the next prompt
    version: int = 0
    checkpoints: list[int] = field(default_factory=list)  # newest last

    def add(self, row: Row) -> Row:
        """A new row, the last."""
        self.rows.append(row)
        self.by_position.setdefault(int(row.id.rpartition("-")[0].rpartition("/")[2]), []).append(row)
        return row

    def of(self, position: int) -> list[Row]:
        """Rows of a prompt's latest attempts."""
        mine = self.by_position.get(position, [])
        latest: dict[str, int] = {}
        for row in mine:
            issued = row.id.split(".")[0]
            latest[issued] = max(latest.get(issued, 0), row.attempt)
        return [row for row in mine if row.attempt == latest[row.id.split(".")[0]]]

    def groups(self, wanted: Callable[[list[Row]], bool], last: int = 200) -> list[int]:
        """Positions, of the ``last`` ones, whose rows are as wanted."""
        return [p for p in range(max(0, self.position - last), self.position) if wanted(self.of(p))]

    def counts(self) -> dict[str, int]:
        """What the ledger must answer."""
        found = Counter(f"dropped/{r.reason}" if r.state == "dropped" else r.state for r in self.rows)
        pending = found.pop("pending", 0) + found.pop("finished", 0)
        return {"issued": len(self.rows), "trained": found.pop("trained", 0), "pending": pending, **found}


def group_of(prompt: Prompt, samples: list[Sample]) -> Group:
    """Siblings share a rollout."""
    rollouts: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        rollouts.setdefault(sample.rollout_id or 0, []).append(index)
    return Group(prompt=prompt, samples=samples, rollouts=rollouts)


def is_pending(rows: list[Row]) -> bool:
    return any(row.state == "pending" for row in rows)


def is_free(rows: list[Row]) -> bool:
    """Finished, and in no step."""
    kept = [row for row in rows if row.state == "finished"]
    return bool(kept) and not is_pending(rows) and not any(row.step for row in kept)


def prompt_of(position: int) -> Prompt:
    """The prompt of a place in the data."""
    return Prompt(id=f"main/{position}", position=position, prompt="1+2=", tokens=[2, 3])


def turns_of(rng: random.Random, name: str, version: int) -> list[RequestTurn]:
    """One turn of a request that was stopped under way."""
    request = GenerateRequest(
        id=name, tokens=[2, 3], params=SamplingParams(max_new_tokens=8), seed=rng.getrandbits(32)
    )
    count = rng.randint(1, 4)
    piece = Completion(
        id=name,
        tokens=[rng.randrange(17) for _ in range(count)],
        log_probs=[-rng.random() for _ in range(count)],
        plain_log_probs=[-rng.random() for _ in range(count)],
        finish="abort",
        versions=[version] * count,
    )
    return [RequestTurn(request=request, pieces=[piece])]


class Life:
    """A ledger on disk and a model of it, side by side: the life of a run, with crashes and resumes.

    The model knows its own rules and no SQL. Each act does one thing to both; `check` compares everything that can be
    asked. Acts draw from the generator that they are given: hypothesis or a loop drives it.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="slime-life-", dir=shared if shared.is_dir() else None))
        self.generation = 0
        self.model = Model()
        self.runner = asyncio.Runner()
        self.steps = 0
        self.crashes = 0
        self._open()

    def close(self) -> None:
        """Check everything a last time, and clear up."""
        try:
            self.check(whole=True)
            assert self.call(audit(self.ledger)) == []
        finally:
            self.call(self.ledger.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def refused(self, work: Coroutine[Any, Any, Any]) -> None:
        """The ledger must not do this."""
        try:
            self.call(work)
        except StorageError:
            return
        raise AssertionError("the ledger did what it must refuse")

    def _open(self) -> None:
        self.run_dir = self.folder / str(self.generation)
        self.ledger = SqliteLedger(self.run_dir)

    # -- what a run does

    def issue(self, rng: random.Random) -> None:
        """New prompts; issuing some of them again changes nothing."""
        count = rng.randint(1, 3)
        groups = [self._pending(self.model.position + k, 0) for k in range(count)]
        self.call(self.ledger.issue(groups))
        if rng.random() < 0.3:
            self.call(self.ledger.issue(groups[: rng.randint(0, count)]))
        for group in groups:
            for sample in group.samples:
                self.model.add(Row(sample.id, 0))
        self.model.position += count

    def restart(self, rng: random.Random) -> None:
        """Another attempt of an open group: the old one is dropped."""
        model = self.model
        position = self._pick(rng, model.groups(lambda rows: is_pending(rows) or is_free(rows)))
        if position is None:
            return
        old = model.of(position)
        attempt = max(row.attempt for row in old) + 1
        group = self._pending(position, attempt)
        self.call(self.ledger.issue([group]))
        for row in old:
            if row.state != "dropped":
                row.state, row.reason = "dropped", "restarted"
        for sample in group.samples:
            model.add(Row(sample.id, attempt))
            model.turns.pop(sample.id, None)

    def complete(self, rng: random.Random) -> None:
        """A group is finished: whole, with siblings, with a sample that is dropped, or with one in another's place."""
        model = self.model
        position = self._pick(rng, model.groups(is_pending))
        if position is None:
            return
        group, drops, kept = self._finished(rng, position), [], []
        unfit = group.samples[:1] if rng.random() < 0.3 else []
        replaced = not unfit and rng.random() < 0.15
        samples = group.samples[1:] if unfit or replaced else group.samples
        if unfit:
            drops = [(unfit, Drop(reason=rng.choice(REASONS)))]
        whole = group_of(group.prompt, samples)
        self.call(self.ledger.finish(whole, drops))
        if rng.random() < 0.3:  # again, with other tokens: it stays as it was
            other = copy.deepcopy(whole)
            for sample in other.samples:
                sample.append_response([7], [-1.0])
            self.call(self.ledger.finish(other))
        for sample, reason in [(s, d.reason) for part, d in drops for s in part]:
            self._drop_row(sample, reason, 0)
        for place, sample in enumerate(samples):
            row = self._row(sample) or self._added(sample)
            row.state, row.payload, row.place, row.newest = "finished", sample, place, max(sample.weight_versions)
            kept.append((row.id, row.attempt))
        for row in model.of(position):
            if row.state == "pending" and (row.id, row.attempt) not in kept:
                row.state, row.reason = "dropped", "replaced"

    def fail(self, rng: random.Random) -> None:
        """A group is dropped, from either of its first states; the first reason stands."""
        position = self._pick(rng, self.model.groups(lambda rows: is_pending(rows) or is_free(rows)))
        if position is None:
            return
        rows = list(self.model.of(position))
        samples = [row.payload or self._sample(position, row) for row in rows]
        reason, before = rng.choice(REASONS), {row.id: row.state for row in rows}
        self.call(self.ledger.drop([(samples, Drop(reason=reason))]))
        self.call(self.ledger.drop([(samples, Drop(reason="too late"))]))
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            if before[row.id] != "dropped":
                self._drop_row(sample, reason, place)

    def suspend(self, rng: random.Random) -> None:
        """Unfinished samples stand still; what they have is kept, in place of what was kept before."""
        position = self._pick(rng, self.model.groups(is_pending))
        if position is None:
            return
        rows = [row for row in self.model.of(position) if row.state == "pending"]
        kept = {row.id: turns_of(rng, row.id, self.model.version) for row in rows}
        self.call(self.ledger.suspend(kept))
        self.model.turns |= kept

    def journal(self, rng: random.Random) -> None:
        """The next step's composition; one that is journaled is what it is."""
        model = self.model
        version, free = model.version + 1, model.groups(is_free)
        if version in model.journals:
            ids = model.journals[version]
            same = self._groups_of(ids)
            self.call(self.ledger.journal(make_batch(version - 1, "main", same)))
            if len(same) > 1:
                self.refused(self.ledger.journal(make_batch(version - 1, "main", same[::-1])))
            return
        chosen = rng.sample(free, min(len(free), rng.randint(1, 3)))
        if not chosen:
            return
        groups = [self._group_of(position) for position in chosen]
        self.call(self.ledger.journal(make_batch(version - 1, "main", groups)))
        model.journals[version] = [sample.id for group in groups for sample in group.samples]
        for position in chosen:
            for row in model.of(position):
                if row.state == "finished":
                    row.step = version
        self.refused(self.ledger.journal(make_batch(version + 5, "main", groups)))
        first = groups[0].samples[0]
        self.refused(self.ledger.drop([([first], Drop(reason="no"))]))

    def train(self, rng: random.Random) -> None:
        """The journaled step is done; made again, it must give the same weights."""
        model = self.model
        version = model.version + 1
        if version not in model.journals:
            self.refused(self.ledger.trained(version, "none"))
            return
        names = ",".join(model.journals[version])
        fingerprint = hashlib.sha256(f"{model.fingerprints.get(version - 1)} {names}".encode()).hexdigest()
        if version in model.fingerprints:
            assert model.fingerprints[version] == fingerprint
            self.refused(self.ledger.trained(version, "other weights"))
        self.call(self.ledger.trained(version, fingerprint))
        self.call(self.ledger.trained(version, fingerprint))
        model.fingerprints[version] = fingerprint
        model.version = version
        for row in model.rows:
            if row.step == version:
                row.state = "trained"

    def checkpoint(self, rng: random.Random) -> None:
        """A version that a resume may begin from; two are kept, and payloads that neither needs are forgotten."""
        model = self.model
        if model.checkpoints[-1:] != [model.version]:
            model.checkpoints = [*model.checkpoints, model.version][-2:]
        if len(model.checkpoints) == 2 and rng.random() < 0.7:
            before = max(0, model.checkpoints[0] - rng.randint(0, 1))
            self.call(self.ledger.prune(before))
            for row in model.rows:
                if (row.state == "trained" and row.step < before) or (row.state == "dropped" and row.newest < before):
                    row.payload = None

    def crash(self, rng: random.Random) -> None:
        """The process is gone: files as they lie there, without a goodbye; then a resume."""
        self.generation += 1
        self.crashes += 1
        shutil.copytree(self.run_dir, self.folder / str(self.generation))
        old, gone = self.ledger, self.run_dir
        self._open()
        self.call(old.close())
        shutil.rmtree(gone)
        model = self.model
        version = model.checkpoints[-1] if model.checkpoints else 0
        self.call(self.ledger.rewind(version))
        if rng.random() < 0.3:
            self.call(self.ledger.rewind(version))
        model.version = version
        for row in model.rows:
            if row.step > version and row.state == "trained":
                row.state = "finished"

    ACTS = (
        *("issue", "issue", "issue", "complete", "complete", "complete", "complete", "complete", "fail", "restart"),
        *("suspend", "journal", "train", "journal", "train", "checkpoint", "crash"),
    )

    def act(self, name: str, seed: int) -> None:
        """One step, then what must always hold."""
        getattr(self, name)(random.Random(seed))
        self.steps += 1
        self.check(whole=self.steps % 100 == 0)

    # -- what must hold

    def check(self, *, whole: bool = False) -> None:
        """Conservation, one state each, compositions, fingerprints, and everything that can be recalled."""
        model = self.model
        counts = dict(self.call(self.ledger.counts()))
        assert {name: count for name, count in counts.items() if count} == {
            name: count for name, count in model.counts().items() if count
        }
        dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
        assert counts["issued"] == counts["trained"] + counts["pending"] + dropped
        versions = sorted(model.journals) if whole else sorted(model.journals)[-3:]
        for version in versions:
            assert self.call(self.ledger.composition(version)) == model.journals[version]
        first = 0 if whole else max(0, model.position - 8)
        names = [f"main/{position}" for position in range(first, model.position)]
        pending = [row.id for p in range(first, model.position) for row in model.of(p) if row.state == "pending"]
        recalled, turns = self.call(self._ask(names, pending))
        for position, name in enumerate(names, first):
            self._check_group(model.of(position), recalled[name])
        assert turns == {name: model.turns[name] for name in pending if name in model.turns}
        if whole:
            self._check_rows()

    async def _ask(self, prompts: list[str], samples: list[str]) -> Any:
        return await self.ledger.groups(prompts), await self.ledger.suspended(samples, before=1 << 30)

    def _check_group(self, rows: list[Row], found: GroupRecord) -> None:
        states = [row.state for row in rows]
        state = next(s for s in ("pending", "trained", "finished", "dropped") if s in states)
        kept = [row for row in rows if row.state == state and (state != "dropped" or row.payload is not None)]
        kept = sorted(kept, key=lambda row: row.place) if state != "pending" else []
        samples = [row.payload for row in kept if row.payload is not None]
        dropped = [row for row in rows if row.state == "dropped" and row not in kept and row.reason != "replaced"]
        reasons = Counter(row.reason for row in dropped)
        assert (found.state, found.attempt) == (state, max(row.attempt for row in rows))
        assert found.samples == samples, rows
        assert found.drops == dict(reasons)
        assert found.version == (kept[0].step if state == "trained" else 0)

    def _check_rows(self) -> None:
        with sqlite3.connect(self.run_dir / "ledger.sqlite") as db:
            states = ("pending", "finished", "trained", "dropped")
            rows = {
                (name, attempt): states[state]
                for name, attempt, state in db.execute("SELECT id, attempt, state FROM samples")
            }
            made = dict(db.execute("SELECT version, fingerprint FROM steps WHERE fingerprint != ''"))
            trained = [version for (version,) in db.execute("SELECT version FROM steps WHERE trained = 1")]
        db.close()
        assert rows == {(row.id, row.attempt): row.state for row in self.model.rows}
        assert made == self.model.fingerprints
        assert sorted(trained) == list(range(1, self.model.version + 1))

    # -- parts

    def _pick(self, rng: random.Random, among: list[int]) -> int | None:
        return rng.choice(among) if among else None

    def _pending(self, position: int, attempt: int) -> Group:
        rows = [Row(f"main/{position}-{j}", attempt) for j in range(N)]
        return group_of(prompt_of(position), [self._sample(position, row) for row in rows])

    def _sample(self, position: int, row: Row) -> Sample:
        rollout = position * N + int(row.id.rpartition("-")[2].split(".")[0])
        return Sample(
            id=row.id, attempt=row.attempt, tokens=[2, 3], group_index=position, rollout_id=rollout, index=rollout
        )

    def _finished(self, rng: random.Random, position: int) -> Group:
        attempt = max(row.attempt for row in self.model.of(position))
        group = self._pending(position, attempt)
        if rng.random() < 0.2:
            group.samples.append(self._sample(position, Row(f"main/{position}-1.1", attempt)))
        for sample in group.samples:
            count = rng.randint(1, 9)
            sample.append_response(
                [rng.randrange(17) for _ in range(count)],
                [-rng.random() for _ in range(count)],
                version=[rng.randint(max(0, self.model.version - 1), self.model.version) for _ in range(count)],
            )
            sample.reward = rng.random()
        return group

    def _row(self, sample: Sample) -> Row | None:
        rows = self.model.by_position.get(sample.group_index or 0, [])
        return next((r for r in rows if (r.id, r.attempt) == (sample.id, sample.attempt)), None)

    def _added(self, sample: Sample) -> Row:
        return self.model.add(Row(sample.id, sample.attempt))

    def _drop_row(self, sample: Sample, reason: str, place: int) -> None:
        row = self._row(sample) or self._added(sample)
        newest = max(sample.weight_versions, default=-1)
        row.state, row.reason, row.place, row.newest = "dropped", reason, place, max(row.newest, newest)

    def _group_of(self, position: int) -> Group:
        rows = sorted(
            (r for r in self.model.of(position) if r.payload is not None and r.state != "dropped"),
            key=lambda r: r.place,
        )
        return group_of(prompt_of(position), [r.payload for r in rows if r.payload])

    def _groups_of(self, ids: list[str]) -> list[Group]:
        positions = dict.fromkeys(int(name.rpartition("-")[0].rpartition("/")[2]) for name in ids)
        return [self._group_of(position) for position in positions]


SEEDS = st.integers(0, 2**16)


class Lives(RuleBasedStateMachine):
    """Hypothesis chooses the acts, and shrinks those that break something."""

    def __init__(self):
        super().__init__()
        self.life = Life()

    def teardown(self):
        self.life.close()


for _name in sorted(set(Life.ACTS)):

    def _rule(self, seed, _name=_name):
        self.life.act(_name, seed)

    _rule.__name__ = _name
    setattr(Lives, _name, rule(seed=SEEDS)(_rule))


def lives(count, steps):
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=count, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def one_long_life(seed, steps):
    rng, life = random.Random(seed), Life()
    try:
        for _ in range(steps):
            life.act(rng.choice(Life.ACTS), rng.getrandbits(32))
        return life.crashes, life.model.version
    finally:
        life.close()


@pytest.mark.integration
def test_short_lives():
    lives(10, 30)


@pytest.mark.integration
def test_a_life_of_three_hundred_acts():
    crashes, version = one_long_life(5, 300)
    assert crashes >= 5
    assert version >= 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_lives_of_five_thousand_acts():
    for seed in range(2):
        crashes, version = one_long_life(seed, 5000)
        assert crashes >= 100
        assert version >= 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_short_lives():
    lives(200, 50)
