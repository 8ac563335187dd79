"""Checksum of a worker's parameters and router biases: the same at every layout, in float32 FSDP's.

Nothing is gathered. Each rank knows where its rows, or its columns of them, lie in the tensors of the model folder,
and sums the float32 masters that it alone has, or its share of copies. Experts that transformers keeps as one stack
are summed as that stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime_core.kernels.quantised import dense
from slime_core.trainers.fingerprint import BLOCK, all_sums, digest, table
from slime_megatron.adapter_entries import spots
from slime_megatron.masters import Master, masters
from slime_megatron.places import BITS, ShardPiece, share
from slime_megatron.saving import Learned, learned, piece_of

if TYPE_CHECKING:
    from slime_convert.bridge import Entry, Sizes
    from slime_megatron.tensors import LocalTensor, Tensors
    from slime_megatron.worker import MegatronWorker

AT_ONCE, AT_ONCE_ON_CPU = 1 << 22, 1 << 16  # elements
LONG = BLOCK  # elements of a run, on average, from which on runs are summed one after another


@torch.no_grad()
def fingerprint(worker: MegatronWorker) -> str:
    """32 hex digits, the same on every rank; a collective. A critic's parameters are part of it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for one in learned(worker):
        for entry in one.tensors.entries:
            shapes |= {one.prefix + spot.name: spot.shape for spot in spots(entry, one.tensors)}
    names = sorted(shapes)
    number = {name: n for n, name in enumerate(names)}
    total = torch.zeros(len(names), 2, dtype=torch.int64, device=worker.device)
    for one in learned(worker):
        for master, shard, begin, end in _owned(one):
            places = [number[one.prefix + spot.name] for spot in spots(shard.entry, one.tensors)]
            sums = _sums(master.weights(), master.begin, begin, end, piece_of(shard), one.tensors, shard.entry)
            total.index_add_(0, torch.tensor(places, device=total.device), sums.to(total.device))
        for local in one.tensors.by_name.values():
            if not local.tensor.requires_grad and local.speaks:  # router biases, a vision tower that is frozen
                (spot,) = spots(local.entry, one.tensors)
                sums = all_sums([(local.tensor.float().reshape(-1), 0)])[0]
                total[number[one.prefix + spot.name]] += sums.to(total.device)
    dist.all_reduce(total)
    return digest({name: (list(shapes[name]), pair) for name, pair in zip(names, total.tolist(), strict=True)})


@torch.no_grad()
def base_sums(tensors: Tensors) -> dict[str, list[int]]:
    """Both sums of each tensor of a model in float32, by its name in transformers' model; a collective."""
    base = tensors.of_model()
    names = sorted({spot.name for entry in base.entries for spot in spots(entry, base)})
    number = {name: n for n, name in enumerate(names)}
    total = torch.zeros(len(names), 2, dtype=torch.int64, device=next(iter(base.by_name.values())).tensor.device)
    for local in base.by_name.values():
        piece, values = piece_of(local), dense(local.tensor.detach()).reshape(-1)
        begin, end = share(0, values.numel(), piece.width, *local.replicas)
        if begin < end:
            places = [number[spot.name] for spot in spots(local.entry, base)]
            sums = _sums(values[begin:end], begin, begin, end, piece, base, local.entry)
            total.index_add_(0, torch.tensor(places, device=total.device), sums.to(total.device))
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def _owned(one: Learned) -> Iterator[tuple[Master, LocalTensor, int, int]]:
    """Elements of shards that this rank sums: each of the model's is some rank's, once."""
    by_id = {id(shard.tensor): shard for shard in one.tensors.by_name.values()}
    for master in masters(one.learner.optimizer):
        shard = by_id.get(id(master.parameter))
        if shard is None or (master.sharded and shard.entry.kind == "whole" and shard.group.rank()):
            continue
        begin, end = master.begin, master.end
        if not master.sharded:
            begin, end = share(begin, end, piece_of(shard).width, *shard.replicas)
        if begin < end:
            yield master, shard, begin, end


@lru_cache(maxsize=256)
def _rows(piece: ShardPiece, sizes: Sizes, device: torch.device) -> torch.Tensor:
    return piece.source_rows(sizes).to(device)


@lru_cache(maxsize=256)
def _runs(piece: ShardPiece, sizes: Sizes) -> tuple[tuple[int, int, int, int], ...]:
    """Rows that follow each other in the folder too: first of the shard, count, the tensor's number, row there.

    Nothing where a row of the shard is no whole row there. Filling is left out.
    """
    if piece.column or piece.whole[1:] != piece.shape[1:]:
        return ()
    source = piece.source_rows(sizes)
    apart = (source[1:] != source[:-1] + 1) | (source[:-1] < 0)
    cuts = [0, *(torch.nonzero(apart).flatten() + 1).tolist(), len(source)]
    firsts = source[cuts[:-1]].tolist()
    spans = zip(cuts, cuts[1:], firsts, strict=False)
    return tuple((a, b - a, first >> BITS, first & (1 << BITS) - 1) for a, b, first in spans if first >= 0)


def _within(
    runs: tuple[tuple[int, int, int, int], ...], begins: tuple[int, ...], width: int, begin: int, end: int
) -> Iterator[tuple[int, int, int, int]]:
    """Of each run what lies in elements ``begin`` to ``end`` of a shard: both ends, its tensor, its element there."""
    for top, count, which, start in runs:
        low, high = max(begin, top * width), min(end, (top + count) * width)
        if low < high:
            yield low, high, which, begins[which] + (start - top) * width + low


def _sums(
    values: torch.Tensor, first: int, begin: int, end: int, piece: ShardPiece, tensors: Tensors, entry: Entry
) -> torch.Tensor:
    """Both sums for each tensor of ``entry.hf``, over elements ``begin`` to ``end`` of a shard; [tensors, 2] int64.

    ``values`` are its elements from ``first`` on.
    """
    width, device = piece.width, values.device
    row, last = begin // width, -(-end // width)
    alike = replace(entry, megatron="", hf=("",) * len(entry.hf), layer=-1, expert=-1)  # as in other layers
    alike_piece = replace(piece, entry=alike)
    totals = torch.zeros(len(entry.hf), 2, dtype=torch.int64, device=device)
    runs = _runs(alike_piece, tensors.sizes)
    if sum(run[1] for run in runs) * width > len(runs) * LONG:  # they need no index of each element
        begins = tuple(spot.begin for spot in spots(entry, tensors))
        within = list(_within(runs, begins, width, begin, end))
        both = all_sums([(values[low - first : high - first].float(), element) for low, high, _, element in within])
        places = torch.tensor([which for _, _, which, _ in within], dtype=torch.int64, device=device)
        return totals.index_add_(0, places, both.to(device))
    source = _rows(alike_piece, tensors.sizes, device)[row:last]
    number = source >> BITS
    start = (source & (1 << BITS) - 1) * math.prod(piece.whole[1:]) + piece.column
    start += torch.tensor([spot.begin for spot in spots(entry, tensors)], device=device)[number.clamp(min=0)]
    most, at = max(1, (AT_ONCE if values.is_cuda else AT_ONCE_ON_CPU) // width), begin
    while at < end:
        line, inside = divmod(at, width)
        if inside or end - at < width:  # the end of a row, or the begin of one
            rows, columns = 1, min(width - inside, end - at)
        else:
            rows, columns = min((end - at) // width, most), width
        part = slice(line - row, line - row + rows)
        index = start[part, None] + torch.arange(inside, inside + columns, device=device)
        block = values[at - first : at - first + rows * columns].view(rows, columns)
        both = sums_at(block.float(), index).sum(-1) * (number[part] >= 0)
        totals.index_add_(0, number[part].clamp(min=0), both.T)
        at += rows * columns
    return totals


@torch.no_grad()
def sums_at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Each element's part of both sums: [2, ...] int64, of ``values`` [...] float32 at ``index`` of their tensor."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    mixed = table(bits.device)[index & (BLOCK - 1)] * ((index >> 16) * 2 + 1)
    return torch.stack((bits, bits * mixed))
