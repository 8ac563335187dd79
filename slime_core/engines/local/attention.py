"""Attention of packed rows over the slots of a CPU; a row's bits depend on its own sequence only.

A row is one token of one sequence. Row i writes its key and value at (slot, position) and attends to positions
0..position of its slot. Every row, of a prompt or of a decode step, goes through products of the same shape:

    [G, d] x [d, L] -> mask, softmax -> [G, 128] x [128, d] + [G, 128] x [128, d] + ...     G query heads a kv head

with L a multiple of 32. Columns past the row's position add exact zeros, and the second product is cut into pieces of
128 because longer sums are blocked by their length (measured; the fused kernel is not invariant at one query row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from slime_core.engines.local.row_counts import RowCounts, tailless
from slime_core.engines.local.slots import BLOCK, KVCache, LayerShape, up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.media import RowMedia

PIECE = 128
"""Longest sum of the second product."""

QUERY_BLOCK = 128
"""Prompt rows that share one L, at most."""

LEAST_BLOCK = 8

BLOCK_CELLS = 1 << 20
"""Rows times heads times columns of a block: its scores stay small, and in a processor's cache, however long L is."""

PASS_CELLS = 1 << 23
"""Of masks that a pass of prompts keeps from layer to layer."""

SPAN_CELLS = 4096
"""Rows times columns of short segments whose keys are copied row by row to attend in one call."""

GATHER = 3
"""What a far row costs, in times of what it would cost among all."""

FAR_COST = 1500
"""What having far rows costs beside, in columns of one row."""


@dataclass(slots=True, frozen=True)
class Form:
    """What a layer's attention does beside scaling."""

    scale: float
    window: int = 0  # positions a row sees, itself included; 0 is all
    softcap: float = 0.0


@dataclass(slots=True, frozen=True)
class Segment:
    """Rows [begin, end) of a pack: consecutive positions of one slot, the first of them ``position``."""

    slot: int
    position: int
    begin: int
    end: int

    @property
    def short(self) -> bool:
        """Whether to copy its keys for every row, beside those of other segments, is cheaper than calls of its own."""
        rows = self.end - self.begin
        return rows * (self.position + rows) <= SPAN_CELLS

    def blocks(self, heads: int) -> list[Segment]:
        """The segment cut into pieces of at most QUERY_BLOCK rows, of fewer where ``heads`` see many columns."""
        cells = heads * (self.position + self.end - self.begin)
        step = min(QUERY_BLOCK, max(LEAST_BLOCK, BLOCK_CELLS // cells))
        starts = range(self.begin, self.end, step)
        return [Segment(self.slot, self.position + b - self.begin, b, min(b + step, self.end)) for b in starts]


@dataclass(slots=True)
class PackedTokens:
    """N tokens for one forward pass, and where each lies.

    Either a decode step, where row i is slot ``first + i`` (``segments`` is None), or packed pieces of prompts, with
    padding rows after the last segment.
    """

    tokens: torch.Tensor  # N, int64
    positions: torch.Tensor  # N, int64; padding rows stand at the cache's scratch position
    slots: torch.Tensor  # N, int64
    longest: int  # columns that attention needs
    scratch: int  # position of rows that stand for no sequence
    first: int = 0  # slot of row 0 of a decode step
    short: int = 0  # columns that are computed for all rows of a decode step
    far: torch.Tensor | None = None  # rows of a decode step that need ``longest`` columns, where few do
    segments: list[Segment] | None = None
    masks: dict[tuple[str | int, int, int], torch.Tensor] = field(default_factory=dict)  # of this pass
    sampled: torch.Tensor | None = None  # rows whose logits are wanted, int64; None is all
    media: RowMedia | None = None

    def position_ids(self) -> torch.Tensor:
        """N positions as a model may be asked about them: padding rows are at 0, where every table has an entry."""
        return self.positions.masked_fill(self.positions == self.scratch, 0)

    def write(self, cache: KVCache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys [N, Hkv, d] and values [N, Hkv, dv]."""
        at = self.slots, slice(None), self.positions
        for cached, new in ((cache.keys[layer], key), (cache.values[layer], value)):
            cached[at] = new.to(cached.dtype)

    def record(self, cache: KVCache, choices: torch.Tensor) -> None:
        """Note the experts [N, layers, k] that the rows were routed to."""
        cache.choices[0][self.slots, :, self.positions] = choices.to(torch.int16)

    def look(
        self, cache: KVCache, layer: int, query: torch.Tensor, form: Form, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the function."""
        return look(cache, layer, self, query, form, sinks)

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(
    segments: list[Segment], tokens: NDArray[np.int64], counts: RowCounts, cache: KVCache, device: str
) -> PackedTokens:
    """Rows of consecutive segments whose ids are ``tokens``, padded to an allowed count."""
    used = len(tokens)
    count = counts.pad(used)
    arrays = np.zeros((3, count), dtype=np.int64)
    arrays[0, :used] = tokens
    arrays[1, :used] = np.concatenate([np.arange(s.position, s.position + s.end - s.begin) for s in segments])
    arrays[1, used:] = cache.scratch
    arrays[2, :used] = np.repeat([s.slot for s in segments], [s.end - s.begin for s in segments])
    arrays[2, used:] = cache.spare
    tensors = torch.from_numpy(arrays).to(device)
    longest = up(max(s.position + s.end - s.begin for s in segments), BLOCK)
    return PackedTokens(tensors[0], tensors[1], tensors[2], longest, cache.scratch, segments=segments)


def decode_rows(
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    active: NDArray[np.bool_],
    cache: KVCache,
    device: str,
    first: int = 0,
) -> PackedTokens:
    """Rows of a decode step of the slots from ``first`` on; idle ones write into the spare slot's scratch."""
    live = np.flatnonzero(active)
    short, longest, far = reach(positions[live], len(active))
    slots = np.arange(first, first + len(active))
    idle = (0, cache.scratch, cache.spare)
    arrays = [np.where(active, column, other) for column, other in zip((tokens, positions, slots), idle, strict=True)]
    tensors = torch.from_numpy(np.stack(arrays)).to(device)
    columns = None if far is None else torch.from_numpy(live[far]).to(device)
    return PackedTokens(
        tensors[0], tensors[1], tensors[2], longest, cache.scratch, first=first, short=short, far=columns
    )


def reach(positions: NDArray[np.int64], slots: int) -> tuple[int, int, NDArray[np.int64] | None]:
    """For active rows at ``positions`` among ``slots``: columns for all, columns for the far rows, and which they are.

    The far rows' keys are gathered, which costs about as much again as computing with them.
    """
    need = -(-(positions + 1) // BLOCK) * BLOCK
    longest = int(need.max(initial=BLOCK))
    best, short = slots * longest, longest
    for length in (BLOCK, *np.unique(need)[:-1].tolist()):
        cost = slots * length + GATHER * int((need > length).sum()) * longest + FAR_COST
        if cost < best:
            best, short = cost, length
    return short, longest, np.flatnonzero(need > short) if short < longest else None


def write(cache: KVCache, layer: int, rows: PackedTokens, both: torch.Tensor) -> None:
    """Write keys and values [N, 2, Hkv, d] at once, into a layer where they are of one width."""
    by_position = cache.by_position[layer]
    by_position.index_put_((rows.slots, rows.positions), both.to(by_position.dtype))


def look(
    cache: KVCache, layer: int, rows: PackedTokens, query: torch.Tensor, form: Form, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with queries [N, Hq, d] whose keys and values are written: [N, Hq, dv].

    ``sinks`` [Hq] are logits of a column without a value.
    """
    count, heads, dim = query.shape
    keys = cache.keys[layer]
    kv_heads = keys.shape[1]
    grouped = query.to(keys.dtype).view(count, kv_heads, heads // kv_heads, dim)
    if form.scale != 1.0:
        grouped = grouped * form.scale
    sink = None if sinks is None else sinks.to(keys.dtype).view(1, kv_heads, heads // kv_heads, 1)
    if rows.segments is None:
        out = _decode(cache, layer, rows, grouped, form, sink)
    else:
        out = _packed(keys, cache.values[layer], rows, grouped, form, sink)
    return out.view(count, heads, -1).to(query.dtype)


def _decode(
    cache: KVCache, layer: int, rows: PackedTokens, query: torch.Tensor, form: Form, sink: torch.Tensor | None
) -> torch.Tensor:
    mask = _mask(rows, "all", rows.positions, rows.short, form.window)
    k, v = cache.front(layer, rows.first, len(rows), rows.short)
    out = _side_by_side(k, v, query, mask, form, sink)
    if rows.far is not None:
        out[rows.far] = _far(cache, layer, rows, query[rows.far], form, sink)
    return out


def _far(
    cache: KVCache, layer: int, rows: PackedTokens, query: torch.Tensor, form: Form, sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the far rows, whose queries these are."""
    assert rows.far is not None
    mask = _mask(rows, "far", rows.positions[rows.far], rows.longest, form.window)
    slots = rows.far + rows.first
    k, v = (
        tensor[:, :, : rows.longest].index_select(0, slots).flatten(0, 1)
        for tensor in (cache.keys[layer], cache.values[layer])
    )
    return _side_by_side(k.transpose(1, 2), v, query, mask, form, sink)


class StepAttention:
    """`look` for decode steps of ``count`` rows over ``length`` columns, with views that are made once.

    A view costs as much as what is done in it for few rows. Queries are put into ``query`` [N, Hkv, G, d], scaled.
    """

    def __init__(self, count: int, heads: int, shape: LayerShape, length: int) -> None:
        kv_heads, dim = shape.kv_heads, shape.key_dim
        self.size = count, length
        self.query = torch.empty(count, kv_heads, heads // kv_heads, dim)
        self._queries = self.query.flatten(0, 1)
        self._scores = self.query.new_empty(*self.query.shape[:3], length)
        self._products = self._scores.flatten(0, 1)
        self._weights = torch.empty_like(self._products)
        self._mixed = torch.empty_like(self.query)
        self._sums, self._out = self._mixed.flatten(0, 1), self._mixed.view(count, heads * dim)

    def look(self, cache: KVCache, layer: int, rows: PackedTokens, form: Form) -> torch.Tensor:
        """[N, Hq * d], which the next call overwrites."""
        k, v = cache.front(layer, rows.first, *self.size)
        torch.bmm(self._queries, k, out=self._products)
        self._scores.add_(_mask(rows, "all", rows.positions, rows.short, form.window))
        torch.softmax(self._products, -1, out=self._weights)
        _sum(self._weights, v, self._sums)
        if rows.far is not None:
            self._mixed[rows.far] = _far(cache, layer, rows, self.query[rows.far], form, None)
        return self._out


def _side_by_side(
    k: torch.Tensor, v: torch.Tensor, query: torch.Tensor, mask: torch.Tensor, form: Form, sink: torch.Tensor | None
) -> torch.Tensor:
    """Row i of [n, Hkv, G, d] attends to the keys and values of its own: [n * Hkv, d, L] and [n * Hkv, L, dv]."""
    count, kv_heads, group, _ = query.shape
    scores = torch.bmm(query.flatten(0, 1), k).view(count, kv_heads, group, -1)
    weights = _weights(scores, mask, form, sink).flatten(0, 1)
    return _sum(weights, v).view(count, kv_heads, group, -1)


def _packed(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PackedTokens,
    query: torch.Tensor,
    form: Form,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    count, kv_heads, group, _ = query.shape
    out = query.new_zeros(count, kv_heads, group, values.shape[-1])
    assert rows.segments is not None
    for first, last, length in spans(rows.segments):
        at = slice(first, last)
        slots = rows.slots[at]
        k, v = (tensor[:, :, :length].index_select(0, slots) for tensor in (keys, values))
        mask = _mask(rows, first, rows.positions[at], length, form.window)
        out[at] = _side_by_side(k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1), query[at], mask, form, sink)
    for segment in rows.segments:
        if segment.short:
            continue
        for part in segment.blocks(kv_heads * group):
            at = slice(part.begin, part.end)
            length = up(part.position + part.end - part.begin, BLOCK)
            k, v = keys[part.slot, :, :length], values[part.slot, :, :length]
            first = 0 if form.window else part.position
            mask = _mask(rows, part.begin, rows.positions[at], length, form.window, first)
            out[at] = _row_by_row(k, v, query[at], mask, form, sink)
    return out


def spans(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Runs of adjacent short segments that fit SPAN_CELLS, as (first row, last row + 1, columns of the longest)."""
    runs: list[tuple[int, int, int]] = []
    for segment in segments:
        if not segment.short:
            continue
        length = up(segment.position + segment.end - segment.begin, BLOCK)
        if runs and runs[-1][1] == segment.begin:
            first, _, longest = runs[-1]
            longest = max(longest, length)
            if (segment.end - first) * longest <= SPAN_CELLS:
                runs[-1] = first, segment.end, longest
                continue
        runs.append((segment.begin, segment.end, length))
    return runs


def _row_by_row(
    k: torch.Tensor, v: torch.Tensor, query: torch.Tensor, mask: torch.Tensor, form: Form, sink: torch.Tensor | None
) -> torch.Tensor:
    """The decode step's products for n rows of one slot, whose keys are the same n times over (stride 0)."""
    count, kv_heads, group, dim = query.shape
    length = k.shape[1]
    scores = query.new_empty(count, kv_heads, group, length)
    for head in range(kv_heads):
        scores[:, head] = torch.bmm(query[:, head], k[head].transpose(0, 1).expand(count, dim, length))
    weights = _weights(scores, mask, form, sink)
    parts = [_sum(weights[:, head], v[head].expand(count, length, -1)) for head in range(kv_heads)]
    return torch.stack(parts, 1)


def _weights(scores: torch.Tensor, mask: torch.Tensor, form: Form, sink: torch.Tensor | None) -> torch.Tensor:
    if form.softcap:
        scores = _capped(scores, form.softcap)
    scores[..., scores.shape[-1] - mask.shape[-1] :] += mask
    if sink is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    column = sink.expand(*scores.shape[:-1], BLOCK).clone()
    column[..., 1:] = -torch.inf  # keeps rows a multiple of the vector width
    joined = torch.softmax(torch.cat([column, scores], -1), -1, dtype=torch.float32)
    return joined[..., BLOCK:].to(scores.dtype)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), padded to a size at which no thread's share ends inside a vector."""
    flat = (scores / cap).view(-1)
    size = flat.numel()
    while not tailless(size, torch.get_num_threads(), flat.itemsize):
        size += BLOCK
    padded = torch.nn.functional.pad(flat, (0, size - flat.numel())) if size > flat.numel() else flat
    return padded.tanh_()[: flat.numel()].view(scores.shape).mul_(cap)


def _sum(weights: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[B, G, L] x [B, L, d], in pieces of 128 columns added in order."""
    length = v.shape[1]
    if length <= PIECE:
        return torch.bmm(weights, v, out=out)
    out = torch.bmm(weights[:, :, :PIECE], v[:, :PIECE], out=out)
    for begin in range(PIECE, length, PIECE):
        out.baddbmm_(weights[:, :, begin : begin + PIECE], v[:, begin : begin + PIECE])
    return out


def _mask(
    rows: PackedTokens, name: str | int, positions: torch.Tensor, length: int, window: int, first: int = 0
) -> torch.Tensor:
    """[n, 1, 1, length - first] for rows at ``positions``: 0 where the row may look, -inf elsewhere.

    Made once a pass, of long windowed prompts once a layer. All rows may look at the columns before ``first``.
    """
    cached = rows.masks.get((name, length, window))
    if cached is not None:
        return cached
    query_positions = positions[:, None]
    column = torch.arange(first, length, device=query_positions.device)
    hidden = column > query_positions
    if window:
        hidden |= column <= query_positions - window
        hidden[:, 0] &= query_positions[:, 0] < rows.scratch  # a row that sees nothing would write NaN
    mask = torch.zeros(hidden.shape, device=query_positions.device).masked_fill_(hidden, -torch.inf)[:, None, None]
    if rows.segments is None or len(rows) * mask.shape[-1] <= PASS_CELLS:
        rows.masks[name, length, window] = mask
    return mask
