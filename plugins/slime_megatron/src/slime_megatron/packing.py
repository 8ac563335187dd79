"""One context-parallel rank's rows of a MicroBatch, and which keys each of them may see.

The pack is filled up to a length that the ranks divide, cut into 2 * cp chunks, and a rank has chunks r and
2 * cp - 1 - r: causal work is even, and no sequence has to be padded by itself.

    pack    a a a a a b b b | b b c c c c . .      cp = 2: rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2
    query rows of a chunk that lie in one sequence are a span; it sees that sequence from its start to the span's end

A prompt that several sequences share is a segment of the pack; what continues it sees its rows first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import MicroBatch
    from slime_megatron.pictures import Pictures


@dataclass
class Pack(PackedSeqParams):
    """What travels with a micro-batch through a model's layers, recomputation included.

    megatron-core takes it for unpacked parameters (``qkv_format``), so it rotates by the rows of the embedding that
    it is given, and hands queries, keys and values on as [T, 1, heads, d].

    ``tokens`` [T] and ``positions`` [T], of three axes [3, T], are this rank's; ``spans`` holds (first, last + 1) of
    its query rows and the rows that they see of all ranks' keys, one rank's after the other's. ``longest`` bounds
    positions. ``lengths`` are those of the spans where each sees its own rows alone, and empty where one is cut or
    sees others too.
    """

    qkv_format: str = "sbhd"
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    longest: int = 0
    spans: tuple[tuple[int, int, torch.Tensor], ...] = ()
    lengths: tuple[int, ...] = ()
    turn: tuple[torch.Tensor, torch.Tensor] | None = (
        None  # cos, sin of each row's angles [T, 1, d], once a model has it
    )
    cu_q: torch.Tensor | None = None  # int32: boundaries of spans in this rank's rows
    cu_k: torch.Tensor | None = None  # int32: boundaries of what they see in ``keys``
    keys: torch.Tensor | None = None  # rows of gathered keys, span after span; None where that is all of them in order
    query_rows: torch.Tensor | None = None  # which of ``keys`` are the spans' own rows; None where all of them are
    most_q: int = 0
    most_k: int = 0
    local: torch.Tensor | None = None  # which of the pack's response rows this rank predicts
    predict: torch.Tensor | None = None  # from which of its rows
    rows: int = 0  # T of all context-parallel ranks together, filling included
    pictures: Pictures | None = None  # of a model that sees
    row_keys: tuple[torch.Tensor, ...] = ()  # where dropout is: of this rank's rows, and with sequence parallelism of
    # those that it has between layers too


def make_pack(micro: MicroBatch, *, cp: int, rank: int, multiple: int, device: torch.device) -> Pack:
    """A context-parallel rank's share.

    Args:
        cp, rank: context-parallel ranks, and which this is
        multiple: what the rows of each rank must divide by (tensor-parallel ranks, with sequence parallelism)
    """
    real = int(micro.cu_seqlens[-1])
    step = multiple * (2 * cp if cp > 1 else 1)
    total = -(-real // step) * step
    tokens = np.zeros(total, np.int64)
    positions = np.broadcast_to(np.arange(total) - real, (*micro.position_ids.shape[:-1], total)).copy()
    tokens[:real], positions[..., :real] = micro.tokens, micro.position_ids
    indices = owned(total, cp, rank)
    place = np.empty(total, dtype=np.int64)  # of a row of the pack among the gathered ones
    place[np.concatenate([owned(total, cp, other) for other in range(cp)])] = np.arange(total)
    bounds = np.append(micro.cu_seqlens, total).astype(np.int64) if total > real else micro.cu_seqlens.astype(np.int64)
    prefix = np.append(micro.prefix, -1) if total > real else micro.prefix
    spans, key_positions = _spans(bounds, prefix.astype(np.int64), chunks(total, cp, rank))
    keys = place[np.concatenate(key_positions)] if key_positions else np.zeros(0, np.int64)
    order = np.full(total, -1, dtype=np.int64)
    order[indices] = np.arange(len(indices))
    at = order[micro.predict]
    local = np.flatnonzero(at >= 0)
    whole = len(keys) == total and bool((keys == np.arange(total)).all())
    counts = [len(rows) for rows in key_positions]
    ends = np.cumsum(counts)
    query_rows = [np.arange(end - (b - a), end) for end, (a, b) in zip(ends, spans, strict=True)]

    def put(values: NDArray[Any], dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.astype(dtype))).to(device, non_blocking=True)

    return Pack(
        tokens=put(tokens[indices]),
        positions=put(positions[..., indices]),
        longest=int(positions.max(initial=0)) + 1,
        spans=tuple((a, b, put(place[rows])) for (a, b), rows in zip(spans, key_positions)),
        lengths=tuple(counts) if whole and counts == [b - a for a, b in spans] else (),
        cu_q=put(np.concatenate([[0], np.cumsum([b - a for a, b in spans])]), np.int32),
        cu_k=put(np.concatenate([[0], np.cumsum(counts)]), np.int32),
        keys=None if whole else put(keys),
        query_rows=put(np.concatenate(query_rows)) if sum(counts) > sum(map(len, query_rows)) else None,
        most_q=max((b - a for a, b in spans), default=0),
        most_k=max(counts, default=0),
        local=put(local),
        predict=put(at[local]),
        rows=total,
    )


def chunks(total: int, cp: int, rank: int) -> list[tuple[int, int]]:
    """Ranges of the pack's rows that a rank has, in their order there."""
    if cp == 1:
        return [(0, total)]
    size = total // (2 * cp)
    return [(number * size, (number + 1) * size) for number in (rank, 2 * cp - 1 - rank)]


def owned(total: int, cp: int, rank: int) -> NDArray[np.int64]:
    """The rows of :func:`chunks`, one after the other."""
    return np.concatenate([np.arange(a, b) for a, b in chunks(total, cp, rank)])


def _spans(
    bounds: NDArray[np.int64], prefix: NDArray[np.int64], ranges: list[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[NDArray[np.int64]]]:
    """Spans of this rank's rows, and for each the rows of the pack that it sees."""
    spans: list[tuple[int, int]] = []
    positions: list[NDArray[np.int64]] = []
    before = 0  # rows of this rank in front of the range
    for start, stop in ranges:
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        for segment in range(first, len(bounds) - 1):
            begin, end = max(start, int(bounds[segment])), min(stop, int(bounds[segment + 1]))
            if int(bounds[segment]) >= stop:
                break
            if begin >= end:
                continue
            keys = np.arange(int(bounds[segment]), end)
            head = int(prefix[segment])
            if head >= 0:
                keys = np.concatenate([np.arange(int(bounds[head]), int(bounds[head + 1])), keys])
            spans.append((before + begin - start, before + end - start))
            positions.append(keys)
        before += stop - start
    return spans, positions
