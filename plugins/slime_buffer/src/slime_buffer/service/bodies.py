"""Bodies to rows, samples and groups of the ledger, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from slime_buffer.service import models
from slime_buffer.service.tables import DROPPED, STATES, Incoming, Stored, Tables
from slime_core.ledger.codec import decode, encode
from slime_core.types import Batch, Group, Prompt, Sample, Status

ABOUT = ("id", "attempt", "task", "prompt", "tokens", "label", "metadata")


def lease_numbers(kind: str, names: Sequence[str]) -> dict[str, int]:
    """The numbers of leases by name (``w17`` of work, ``b4`` of a batch); names that are none are left out."""
    digits = {name: name.removeprefix(kind) for name in names if name.startswith(kind)}
    return {name: int(text) for name, text in digits.items() if text.isascii() and text.isdigit() and len(text) < 19}


def incoming(rollout: models.Rollout, group: str, attempt: int) -> Incoming:
    """A written rollout as the store keeps it until its siblings are there."""
    samples = [_sample(sequence) for sequence in rollout.sequences]
    return Incoming(
        group=group,
        attempt=attempt,
        sample=rollout.sample,
        bodies=[b"".join(encode(sample)) for sample in samples],
        tokens=[len(sample.tokens) for sample in samples],
        failed=rollout.failed,
    )


def pushed(group: models.PushedGroup) -> tuple[dict[str, Any], list[Incoming]]:
    """A pushed group's own row, and its rollouts."""
    rollouts = [incoming(rollout, group.id, group.attempt) for rollout in group.rollouts]
    return group.model_dump(mode="json", include=set(ABOUT)), rollouts


def _sample(sequence: models.Sequence) -> Sample:
    count = sequence.response_length
    reward = sequence.reward
    return Sample(
        response=sequence.response,
        tokens=sequence.tokens,
        response_length=count,
        loss_mask=sequence.loss_mask or [1] * count,
        reward=dict(reward) if isinstance(reward, dict) else reward,
        status=Status(sequence.status),
        rollout_log_probs=sequence.log_probs,
        weight_versions=sequence.weight_versions,
        temperature=sequence.temperature,
        metadata=sequence.metadata,
        train_metadata=sequence.train_metadata,
    )


def _sequence(sample: Sample) -> models.Sequence:
    return models.Sequence.model_construct(
        tokens=sample.tokens,
        response_length=sample.response_length,
        log_probs=sample.rollout_log_probs or [],
        weight_versions=sample.weight_versions,
        loss_mask=sample.loss_mask,
        response=sample.response,
        status="completed" if sample.status is Status.COMPLETED else "truncated",
        reward=sample.reward,
        temperature=sample.temperature,
        metadata=sample.metadata,
        train_metadata=sample.train_metadata,
    )


def pending(group: Stored) -> Group:
    """An open group, as issued to the ledger."""
    samples = [Sample(id=f"{group.ledger_id}-{place}", rollout_id=place) for place in range(len(group.names))]
    return Group(prompt=_prompt(group), samples=samples, rollouts={place: [place] for place in range(len(samples))})


def whole(group: Stored, rows: Sequence[tuple[int, int, bytes | None, str]]) -> tuple[Group, list[Sample]]:
    """A complete group from its ``place, part, body, failed`` rows, and the samples of it that failed."""
    done = Group(prompt=_prompt(group), samples=[], rollouts={})
    failed = []
    for place, part, body, _ in rows:
        name = f"{group.ledger_id}-{place}" + (f".{part}" if part else "")
        if body is None:
            failed.append(Sample(id=name, rollout_id=place))
            continue
        sample = decode(body)
        sample.id, sample.rollout_id, sample.task = name, place, done.prompt.task
        done.rollouts.setdefault(place, []).append(len(done.samples))
        done.samples.append(sample)
    return done, failed


def _prompt(group: Stored) -> Prompt:
    return Prompt(id=group.ledger_id, task=str(group.spec.get("task", "default")), position=group.serial)


def work(lease: int, group: Stored, missing: Sequence[int], engine: str) -> models.Work:
    """An open group for a generator."""
    specs = group.spec["samples"]
    fields = {
        **{name: group.spec[name] for name in (*ABOUT, "sampling", "version")},
        "lease": f"w{lease}",
        "run": group.run,
        "samples": [specs[place] for place in missing],
        "engine": json.loads(engine) if engine else None,
    }
    return models.Work.model_validate(fields)


def ended(group: Stored, samples: Sequence[Sample]) -> models.Ended:
    """A group that has ended, with its samples in the order of `Stored.sample_ids`."""
    about = {name: group.spec[name] for name in ABOUT}
    dropped = group.state == DROPPED
    state: Literal["finished", "dropped"] = "dropped" if dropped else "finished"
    rollouts, place = [], 0
    for name, (parts, failed) in zip(group.names, [] if dropped else group.outcome, strict=False):
        sequences = [_sequence(sample) for sample in samples[place : place + parts]]
        rollouts.append(models.Rollout.model_construct(sample=name, sequences=sequences, failed=failed))
        place += parts
    return models.Ended.model_construct(**about, state=state, reason=group.reason, rollouts=rollouts)


def acknowledged(step: int, sample_ids: list[str]) -> Batch:
    """What readers have taken, as the ledger's step of that number."""
    nothing: Any = np.zeros(0, dtype=np.int64)
    return Batch(
        version=step - 1,
        stage="read",
        sample_ids=sample_ids,
        tasks=["default"] * len(sample_ids),
        group=nothing,
        rollout=nothing,
        reward=nothing,
        tokens=nothing,
        offsets=nothing,
        loss_mask=nothing,
        response_offsets=nothing,
    )


def peek(tables: Tables, query: models.PeekQuery) -> models.Rows:
    """One page of groups."""
    where, values = ["serial > ?"], [query.after]
    if query.state is not None:
        where.append("state = ?")
        values.append(STATES.index(query.state))
    if query.run is not None:
        where.append("run = ?")
        values.append(query.run)  # type: ignore[arg-type]
    columns = "serial, run, id, attempt, task, state, reason, size, written, unread, lease, claim"
    rows = tables.rows(
        f"SELECT {columns} FROM groups WHERE {' AND '.join(where)} ORDER BY serial LIMIT ?", *values, query.limit
    )
    return models.Rows(groups=[_row(*row) for row in rows])


def _row(serial: int, run: str, name: str, attempt: int, task: str, state: int, reason: str, *rest: Any) -> models.Row:
    size, written, unread, lease, claim = rest
    return models.Row.model_construct(
        serial=serial,
        run=run,
        group=name,
        attempt=attempt,
        task=task,
        state=STATES[state],  # type: ignore[arg-type]
        reason=reason,
        samples=size,
        written=written,
        unread=bool(unread),
        leased=lease is not None,
        claimed=claim is not None and bool(unread),
    )


def tallies(tables: Tables) -> tuple[dict[str, int], dict[str, int]]:
    """Groups by state, and lengths of the queues."""
    groups = dict.fromkeys(STATES, 0)
    groups |= {STATES[s]: count for s, count in tables.rows("SELECT state, count(*) FROM groups GROUP BY state")}
    count = "SELECT count(*) FROM groups WHERE "
    queues = {
        "open": tables.one(count + "state = 0 AND lease IS NULL"),
        "leased": tables.one(count + "lease IS NOT NULL"),
        "unread": tables.one(count + "unread = 1 AND claim IS NULL"),
        "claimed": tables.one(count + "unread = 1 AND claim IS NOT NULL"),
        "staged_rollouts": tables.one("SELECT coalesce(sum(written), 0) FROM groups WHERE state = 0"),
    }
    return groups, queues
