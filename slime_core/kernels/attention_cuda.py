# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`attention.paged_attention` and the forward pass of `attention.varlen_attention` as one Triton kernel.

A program computes one tile of rows of one segment for one head of keys: its rows are (token, query head of the group)
pairs, so that keys are read once a group. Softmax is online (Milakov and Gimelshein 2018; Dao 2023,
"FlashAttention-2"); few decode rows are split over their keys, with a second kernel that adds the parts up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slime_core.kernels.attention_batch import AttentionBatch, ScoreForm

Tensor = torch.Tensor
LOG2E = 1.4426950408889634
PARTS = 2
"""Programs a multiprocessor should have before decode rows are split no further."""


class AttentionTile(NamedTuple):
    """Rows and keys of one step of a kernel, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def locate(cu_rows, segments, tile, PER_TILE: tl.constexpr):
    """Segment of a tile, which has tiles from ``cu_rows[s] // PER_TILE + s`` on, and the tile's first token in it."""
    low = 0
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_rows + middle) // PER_TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - (tl.load(cu_rows + low) // PER_TILE + low)) * PER_TILE


@triton.jit
def score(q, k, scale, cap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in units of log2, but for ``scale``, which is 1 where they are capped."""
    s = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        s = cap * (2 * tl.sigmoid(2 * s * scale) - 1)
    return s


@triton.jit
def _scan(
    q, acc, m, total, position, begin, end, keys, values, table, k_page, k_token, v_page, v_token, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``begin`` to ``end``; without ``MASKED`` every row sees all of them."""
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    for start in tl.range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        if PAGE > 0:
            page = tl.load(table + column // PAGE, mask=inside, other=0).to(tl.int64)
            k_at = page * k_page + (column % PAGE) * k_token
            v_at = page * v_page + (column % PAGE) * v_token
        else:
            k_at = column.to(tl.int64) * k_token
            v_at = column.to(tl.int64) * v_token
        if MASKED:
            k = tl.load(keys + k_at[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(values + v_at[:, None] + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            k = tl.load(keys + k_at[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(values + v_at[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        s = score(q, k, scale, cap, SOFTCAP, PRECISION)
        if MASKED:
            visible = column[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= column[None, :] > position[:, None] - WINDOW
            s = tl.where(visible, s, -float("inf"))
        factor = 1.0 if SOFTCAP else scale
        high = tl.maximum(m, tl.max(s, 1) * factor)
        peak = high
        if WINDOW > 0:
            peak = tl.where(high == -float("inf"), 0.0, high)
        p = tl.exp2(s * factor - peak[:, None])
        shrink = tl.exp2(m - peak)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = high
    return acc, m, total


@triton.jit(do_not_specialize=["segments", "table_stride"])
def _attend(
    query, keys, values, out, lse, cu_rows, lengths, tables, sinks, segments, table_stride, q_row, q_head, k_page,
    k_token, k_head, v_page, v_token, v_head, scale, cap, heads,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DECODE: tl.constexpr,
    SKIP: tl.constexpr, ONE_LOOP: tl.constexpr, SPLITS: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: ``DECODE`` takes segments of one row, by id; else tiles are located, past those rows with ``SKIP``."""
    head = tl.program_id(1)
    per_tile: tl.constexpr = ROWS // GROUP
    if DECODE:
        segment = tl.program_id(0)
        begin = 0
    else:
        segment, begin = locate(cu_rows, segments, tl.program_id(0), per_tile)
    first = tl.load(cu_rows + segment)
    rows = tl.load(cu_rows + segment + 1) - first
    if DECODE:
        begin = tl.where(rows == 1, begin, rows)
    if SKIP:
        begin = tl.where(rows == 1, rows, begin)
    length = rows
    table = tables
    if PAGE > 0:
        length = tl.load(lengths + segment)
        table += segment.to(tl.int64) * table_stride
    else:
        keys += first.to(tl.int64) * k_token
        values += first.to(tl.int64) * v_token
    m_index = tl.arange(0, ROWS)
    token = begin + m_index // GROUP
    valid = (token < rows) & (m_index < per_tile * GROUP)
    query_head = head * GROUP + m_index % GROUP
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    row = (first + token).to(tl.int64)
    q = tl.load(
        query + (row * q_row + query_head * q_head)[:, None] + d[None, :],
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    if begin >= rows:  # after the loads, which wait for nothing but each other
        return
    position = length - rows + token
    low = 0
    end = tl.minimum(length, length - rows + begin + per_tile)
    if WINDOW > 0:
        low = tl.maximum(length - rows + begin - WINDOW + 1, 0) // BLOCK * BLOCK
    if SPLITS > 1:
        blocks = tl.cdiv(end - low, BLOCK)
        span = tl.maximum(tl.cdiv(blocks, SPLITS), 2) * BLOCK
        low += tl.program_id(2) * span
        end = tl.minimum(end, low + span)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    keys += head * k_head
    values += head * v_head
    full = low
    if not ONE_LOOP and WINDOW == 0:
        full = tl.maximum(tl.minimum(length - rows + begin + 1, end), low) // BLOCK * BLOCK
        acc, m, total = _scan(
            q, acc, m, total, position, low, full, keys, values, table, k_page, k_token, v_page, v_token, scale, cap,
            D, DV, DP, DVP, PAGE, WINDOW, SOFTCAP, BLOCK, False, PRECISION,
        )  # fmt: skip
    acc, m, total = _scan(
        q, acc, m, total, position, full, end, keys, values, table, k_page, k_token, v_page, v_token, scale, cap,
        D, DV, DP, DVP, PAGE, WINDOW, SOFTCAP, BLOCK, True, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:
        at = (segment.to(tl.int64) * heads + query_head) * SPLITS + tl.program_id(2)
        tl.store(out + at[:, None] * DV + dv[None, :], acc, mask=valid[:, None] & (dv < DV)[None, :])
        tl.store(lse + at * 2, m, mask=valid)
        tl.store(lse + at * 2 + 1, total, mask=valid)
        return
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(m, sink)
        shrink = tl.exp2(m - high)
        total = total * shrink + tl.exp2(sink - high)
        acc = acc * shrink[:, None]
        m = high
    total = tl.where(total == 0.0, 1.0, total)
    at = row * heads + query_head
    tl.store(
        out + at[:, None] * DV + dv[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=valid[:, None] & (dv < DV)[None, :],
    )
    if LSE:
        tl.store(lse + at, m + tl.log2(total), mask=valid)


@triton.jit
def _join(parts, lse, out, cu_rows, sinks, heads, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr,
          SPLITSP: tl.constexpr):  # fmt: skip
    """Add up the parts of one head of one decode row."""
    segment = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_rows + segment)
    if tl.load(cu_rows + segment + 1) - first != 1:
        return
    part = tl.arange(0, SPLITSP)
    dv = tl.arange(0, DVP)
    at = (segment.to(tl.int64) * heads + head) * SPLITS + part
    m = tl.load(lse + at * 2, mask=part < SPLITS, other=-float("inf"))
    totals = tl.load(lse + at * 2 + 1, mask=part < SPLITS, other=0.0)
    acc = tl.load(
        parts + at[:, None] * DV + dv[None, :], mask=(part < SPLITS)[:, None] & (dv < DV)[None, :], other=0.0
    )
    high = tl.max(m, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(high, sink)
    high = tl.where(high == -float("inf"), 0.0, high)
    shrink = tl.exp2(m - high)
    total = tl.sum(totals * shrink, 0)
    if sinks is not None:
        total += tl.exp2(sink - high)
    total = tl.where(total == 0.0, 1.0, total)
    joined = tl.sum(acc * shrink[:, None], 0) / total
    place = (first.to(tl.int64) * heads + head) * DV
    tl.store(out + place + dv, joined.to(out.dtype.element_ty), mask=dv < DV)


def tile(query: Tensor, width: int, group: int, kind: str) -> AttentionTile:
    """AttentionTile of the forward kernel, by dtype, the wider head and ``kind``: decode, prefill or invariant."""
    wide, least = width > 128, max(int(triton.next_power_of_2(group)), 16)
    if query.dtype == torch.float32:
        return AttentionTile(least if wide else max(32, least), 16 if wide else 32, 4, 1)
    if kind == "decode":
        return AttentionTile(least, 32 if wide else 64, 4, 2 if wide else 3)
    if kind == "invariant" or wide:
        return AttentionTile(max(64, least), 32 if wide else 64, 4, 2)
    return AttentionTile(max(128, least), 64, 4 if width <= 64 else 8, 3)


def precision(query: Tensor) -> str:
    """Products of float32 are three of TF32, for float32's precision; the other dtypes ignore it."""
    return "tf32x3" if query.dtype == torch.float32 else "tf32"


class AttentionLaunch(NamedTuple):
    """The arguments that all launches of one call share."""

    arguments: tuple[object, ...]
    constants: dict[str, object]
    tokens: int
    segments: int
    kv_heads: int

    def run(self, out: Tensor, lse: Tensor | None, shape: AttentionTile, splits: int = 1, **flags: bool) -> None:
        """AttentionLaunch over segments (``DECODE``) or located tiles."""
        per_tile = shape.rows // int(str(self.constants["GROUP"]))
        tiles = self.segments if flags.get("DECODE") else self.tokens // per_tile + self.segments
        query, keys, values, *rest = self.arguments
        names = {"DECODE": False, "SKIP": False, "ONE_LOOP": False, "LSE": False} | flags
        _attend[(tiles, self.kv_heads, splits)](
            query, keys, values, out, lse, *rest, **self.constants, **names, SPLITS=splits, ROWS=shape.rows,
            BLOCK=shape.keys, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: tuple[Tensor, Tensor | None, Tensor | None],
    form: ScoreForm,
    sinks: Tensor | None,
) -> AttentionLaunch:
    cu_rows, lengths, tables = segments
    heads, width = query.shape[1:]
    kv_heads, value_width = values.shape[-2:]
    scale, cap = scales(form)
    pages = (0, 0) if tables is None else (keys.stride(0), values.stride(0))
    arguments = (
        query, keys, values, cu_rows, lengths, tables, sinks, len(cu_rows) - 1,
        0 if tables is None else tables.stride(0), query.stride(0), query.stride(1),
        pages[0], keys.stride(-3), keys.stride(-2), pages[1], values.stride(-3), values.stride(-2),
        scale, cap, heads,
    )  # fmt: skip
    constants: dict[str, object] = {
        "GROUP": heads // kv_heads, "D": width, "DV": value_width, "PAGE": 0 if tables is None else keys.shape[1],
        "DP": padded(width), "DVP": padded(value_width), "WINDOW": form.window, "SOFTCAP": bool(form.softcap),
        "PRECISION": precision(query),
    }  # fmt: skip
    return AttentionLaunch(arguments, constants, len(query), len(cu_rows) - 1, kv_heads)


def scales(form: ScoreForm) -> tuple[float, float]:
    """Factor of q k, and the cap, such that scores come out in units of log2."""
    return (form.scale / form.softcap, form.softcap * LOG2E) if form.softcap else (form.scale * LOG2E, 0.0)


def padded(width: int) -> int:
    """Width of a tile that holds a head: a power of two that a product takes."""
    return max(int(triton.next_power_of_2(width)), 16)


def paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    form: ScoreForm,
    sinks: Tensor | None,
    invariant: bool,
) -> Tensor:
    """See `attention.paged_attention`; how often decode rows are split depends on shapes alone."""
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    segments = (batch.cu_rows, batch.lengths, batch.tables)
    launch = _launch(inner(query), inner(keys), inner(values), segments, form, sinks)
    width, group = max(query.shape[-1], values.shape[-1]), query.shape[1] // values.shape[2]
    if invariant:
        launch.run(out, None, tile(query, width, group, "invariant"), ONE_LOOP=True)
        return out
    if batch.max_rows > 1:
        launch.run(out, None, tile(query, width, group, "prefill"), SKIP=True)
    shape = tile(query, width, group, "decode")
    splits = _splits(launch, shape, batch.tables.shape[1] * keys.shape[1], query.device)
    if splits == 1:
        launch.run(out, None, shape, DECODE=True)
        return out
    rows = launch.segments * query.shape[1] * splits
    parts = query.new_empty(rows * values.shape[-1], dtype=torch.float32)
    lse = query.new_empty(rows * 2, dtype=torch.float32)
    launch.run(parts, lse, shape, splits, DECODE=True)
    _join[(launch.segments, query.shape[1])](
        parts, lse, out, batch.cu_rows, sinks, query.shape[1], DV=values.shape[-1], DVP=padded(values.shape[-1]),
        SPLITS=splits, SPLITSP=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out


def _splits(launch: AttentionLaunch, shape: AttentionTile, longest: int, device: torch.device) -> int:
    """Parts of a decode row's keys: a power of two that fills the device, of two steps at least."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    parts = max(PARTS * count // (launch.segments * launch.kv_heads), 1)
    return min(1 << (parts.bit_length() - 1), max(longest // (2 * shape.keys), 1), 64)


def inner(tensor: Tensor) -> Tensor:
    """The tensor with heads whose numbers lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    form: ScoreForm,
    sinks: Tensor | None,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Output [N, Hq, Dv], and log2 of the sum of exponentials, [N, Hq] float32."""
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    launch = _launch(query, key, value, (cu_seqlens, None, None), form, sinks)
    width, group = max(query.shape[-1], value.shape[-1]), query.shape[1] // value.shape[1]
    shape = tile(query, width, group, "invariant" if invariant else "prefill")
    launch.run(out, lse, shape, ONE_LOOP=invariant, LSE=True)
    return out, lse
