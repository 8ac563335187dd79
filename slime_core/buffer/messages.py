"""Calls of a ledger as bytes: framed, a JSON header and payloads behind it; nothing is ever unpickled.

frame   header length, u32 | payload length, u64 | header | payloads end to end          little endian
call    {"message": 7, "acknowledged": 5, "op": "finish", ..., "sizes": [812, 790]}
answer  {"message": 7, "value": ..., "sizes": []} or {"message": 7, "error": {...}, "kind": "StorageError"}
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slime_core.buffer.codec import decode, encode, plain_reward
from slime_core.buffer.turns import decode_turns, encode_turns
from slime_core.errors import SlimeError, StorageError, remade
from slime_core.protocols import Drops, Recalled, Turn
from slime_core.types import Drop, Group, Prompt, Sample

FRAME = struct.Struct("<IQ")
HEADER_BYTES = 64 << 20
PAYLOAD_BYTES = 2 << 30


@dataclass(slots=True)
class Message:
    """A header and its payloads."""

    header: dict[str, Any]
    payloads: list[bytes] = field(default_factory=list)

    def take(self, count: int) -> list[bytes]:
        """The next ``count`` payloads.

        Raises:
            ValueError: there are fewer.
        """
        if len(self.payloads) < count:
            raise ValueError("a message has fewer payloads than it says")
        taken, self.payloads = self.payloads[:count], self.payloads[count:]
        return taken

    def frame(self) -> bytes:
        """The bytes to send."""
        text = json.dumps({**self.header, "sizes": [len(p) for p in self.payloads]}, separators=(",", ":")).encode()
        return b"".join([FRAME.pack(len(text), sum(map(len, self.payloads))), text, *self.payloads])


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        ValueError: bytes that are no message of ours.
        asyncio.IncompleteReadError, ConnectionError: the other side is gone.
    """
    length, rest = FRAME.unpack(await reader.readexactly(FRAME.size))
    if length > HEADER_BYTES or rest > PAYLOAD_BYTES:
        raise ValueError(f"a message of {length} and {rest} bytes")
    header = json.loads(await reader.readexactly(length))
    body = await reader.readexactly(rest)
    sizes = header.pop("sizes") if isinstance(header, dict) else None
    if not isinstance(sizes, list) or not all(isinstance(s, int) and s >= 0 for s in sizes) or sum(sizes) != rest:
        raise ValueError("a message whose payloads do not add up")
    payloads, start = [], 0
    for size in sizes:
        payloads.append(body[start : start + size])
        start += size
    return Message(header, payloads)


def pack_group(group: Group) -> Message:
    """A group with its samples whole; what the ledger does not read of a prompt stays behind."""
    return Message(
        {"group": [group.id, group.prompt.position, len(group.samples)]}, [_sample(s) for s in group.samples]
    )


def unpack_group(message: Message) -> Group:
    """What :func:`pack_group` packed."""
    name, position, count = message.header["group"]
    return _group(name, position, [decode(body) for body in message.take(count)])


def pack_issue(groups: Iterable[Group]) -> Message:
    """Groups as they are issued: names alone."""
    named = [[g.id, g.prompt.position, [[s.id, s.attempt, s.rollout_id] for s in g.samples]] for g in groups]
    return Message({"groups": named})


def unpack_issue(message: Message) -> list[Group]:
    """What :func:`pack_issue` packed."""
    return [
        _group(name, position, [Sample(id=i, attempt=attempt, rollout_id=rollout) for i, attempt, rollout in samples])
        for name, position, samples in message.header["groups"]
    ]


def pack_drops(drops: Drops) -> Message:
    """Samples that do not train: what the ledger's row holds of them."""
    named = [[drop.reason, len(samples)] for samples, drop in drops]
    return Message({"drops": named}, [_sample(_bare(s)) for samples, _ in drops for s in samples])


def unpack_drops(message: Message) -> list[tuple[list[Sample], Drop]]:
    """What :func:`pack_drops` packed."""
    return [
        ([decode(body) for body in message.take(count)], Drop(reason=reason))
        for reason, count in message.header["drops"]
    ]


def pack_turns(turns: Mapping[str, Sequence[Turn]]) -> Message:
    """Suspended turns by sample id."""
    return Message({"turns": list(turns)}, [b"".join(encode_turns(kept)) for kept in turns.values()])


def unpack_turns(message: Message) -> dict[str, list[Turn]]:
    """What :func:`pack_turns` packed."""
    names = message.header["turns"]
    return {name: decode_turns(body) for name, body in zip(names, message.take(len(names)), strict=True)}


def pack_samples(samples: Sequence[Sample]) -> Message:
    """Samples whole."""
    return Message({"samples": len(samples)}, [_sample(sample) for sample in samples])


def unpack_samples(message: Message) -> list[Sample]:
    """What :func:`pack_samples` packed."""
    return [decode(body) for body in message.take(message.header["samples"])]


def pack_recalled(known: Mapping[str, Recalled]) -> Message:
    """What a ledger knows of groups, by prompt id."""
    named = {name: {**asdict(replace(r, samples=[])), "samples": len(r.samples)} for name, r in known.items()}
    return Message({"known": named}, [_sample(sample) for r in known.values() for sample in r.samples])


def unpack_recalled(message: Message) -> dict[str, Recalled]:
    """What :func:`pack_recalled` packed."""
    return {
        name: Recalled(**{**fields, "samples": [decode(body) for body in message.take(fields["samples"])]})
        for name, fields in message.header["known"].items()
    }


def pack_error(error: BaseException) -> dict[str, Any]:
    """An error for the other side; one that is none of ours keeps its text."""
    if isinstance(error, SlimeError):
        return {"error": error.as_dict(), "kind": type(error).__name__}
    text = f"{type(error).__name__}: {error}"
    return {"error": StorageError("the ledger failed", why=text).as_dict(), "kind": "StorageError"}


def unpack_error(header: Mapping[str, Any]) -> SlimeError:
    """What :func:`pack_error` packed."""
    return remade(str(header["kind"]), header["error"], StorageError)


def _sample(sample: Sample) -> bytes:
    return b"".join(encode(sample))


def _bare(sample: Sample) -> Sample:
    return Sample(
        id=sample.id,
        attempt=sample.attempt,
        group_index=sample.group_index,
        rollout_id=sample.rollout_id,
        tokens=sample.tokens,
        response_length=sample.response_length,
        weight_versions=sample.weight_versions,
        reward=plain_reward(sample),
    )


def _group(name: str, position: int, samples: list[Sample]) -> Group:
    rollouts = {place: [place] for place in range(len(samples))}
    return Group(prompt=Prompt(id=name, position=position), samples=samples, rollouts=rollouts)
