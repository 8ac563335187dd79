"""Attention within each sequence of a pack: no padding between layers, no [T, T] mask.

Sequences of about the same length, which packs keep side by side, are one batched call. Inside such a call a shorter
one is filled up to the longest; causality hides the filling, so no mask is needed for it either. A prompt that several
sequences share is one segment of the pack; its keys and values are read by each of them. On a GPU in half precision
short sequences are one varlen flash call; long ones are a call each, for which torch takes cuDNN's kernels where there
are some.

:func:`segment_attention` is registered with transformers' `AttentionInterface`; the boundaries travel to it as the
keyword argument ``segments`` of the model's forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slime_core.kernels.attention import varlen_attention
from slime_core.trainers.flash import filled, has_cudnn, varlen
from slime_core.trainers.fsdp.exchange import HeadExchange
from slime_core.trainers.optimizer_step import to_device

NAME = "slime_segments"
FILLING = 0.125  # of a batched call's rows, at most
ROWS = 2048  # of a run on a CPU: what is made of them stays in its caches, and calls do not add up
LONG = 1024  # tokens of a mean sequence from which a call each costs nothing on a GPU
SHORT = 128  # tokens up to which plain products beat the flash kernel on a CPU

RowMove = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True, frozen=True)
class SequenceRun:
    """Sequences of a pack that attend in one call: ``count`` of at most ``length`` tokens, shared prompts included.

    ``gather`` [count * length] is the pack's row of each place of the call; filled-up places repeat a row. It is None
    where the sequences are rows ``start`` to ``stop`` as they lie. ``rows`` get their output from this call, at its
    ``places``. ``future`` [length, length] is -inf above the diagonal, for short runs on a CPU.
    """

    start: int
    stop: int
    count: int
    length: int
    gather: torch.Tensor | None
    rows: torch.Tensor | None
    places: torch.Tensor | None
    future: torch.Tensor | None

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [count, length, ...]."""
        rows = x[self.start : self.stop] if self.gather is None else take(x, self.gather)
        return rows.reshape(self.count, self.length, *x.shape[1:])

    def fill_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Gradients of outputs [T, ...] to [count, length, ...], 0 in places whose output is not used."""
        if self.rows is None or self.places is None:
            return self.fill(x)
        filled = x.new_zeros(self.count * self.length, *x.shape[1:])
        filled.index_copy_(0, self.places, x.index_select(0, self.rows))
        return filled.view(self.count, self.length, *x.shape[1:])

    def put(self, filled: torch.Tensor, out: torch.Tensor) -> None:
        """Write the outputs [count, length, ...] that are used to their rows of ``out`` [T, ...]."""
        flat = filled.reshape(self.count * self.length, *filled.shape[2:])
        if self.rows is None or self.places is None:
            out[self.start : self.stop] = flat
        else:
            out.index_copy_(0, self.rows, flat.index_select(0, self.places))

    def add(self, filled: torch.Tensor, out: torch.Tensor) -> None:
        """Add gradients of inputs [count, length, ...] to their rows of ``out`` [T, ...]; shared rows get the sum."""
        flat = filled.reshape(self.count * self.length, *filled.shape[2:])
        if self.gather is None:
            out[self.start : self.stop] = flat
        else:
            out.index_add_(0, self.gather, flat)


@dataclass(slots=True, frozen=True)
class SharedRows:
    """Rows of a pack that several of its sequences have, and where they lie with all sequences end to end."""

    gather: torch.Tensor  # [rows end to end], the pack's row of each
    last: torch.Tensor  # [T], for each row of the pack the place that its output is taken from
    used: torch.Tensor  # [rows end to end, 1] bool, whether an output is taken from there
    rows: torch.Tensor  # [n], of the pack: those that lie in more than one place
    places: torch.Tensor  # [n, most], where they lie, filled up
    counts: torch.Tensor  # [n, most, 1] bool, where it is not filled up

    @classmethod
    def of(cls, flat: NDArray[np.int64], count: int, device: torch.device | str) -> SharedRows:
        """From the pack's row of each place, of ``count`` rows."""
        last = np.zeros(count, dtype=np.int64)
        last[flat] = np.arange(len(flat))
        often = np.bincount(flat, minlength=count)
        rows = np.flatnonzero(often > 1)
        order = np.argsort(flat, kind="stable")
        offsets, most = np.cumsum(often) - often, int(often.max(initial=1))
        counts = np.arange(most) < often[rows, None]
        places = order[np.where(counts, offsets[rows, None] + np.arange(most), 0)]
        used = (last[flat] == np.arange(len(flat)))[:, None]
        arrays = flat, last, used, rows, places, counts[..., None]
        return cls(*(to_device(array, torch.device(device)) for array in arrays))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the pack [T, width] to rows end to end."""
        return x.index_select(0, self.gather)

    def spread_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the pack's rows from that of rows end to end: sums in a fixed order."""
        out = grad.index_select(0, self.last)
        repeats = grad.index_select(0, self.places.flatten()).view(*self.places.shape, grad.shape[1])
        sums = torch.where(self.counts, repeats, 0).sum(1, dtype=torch.float32)
        return out.index_copy_(0, self.rows, sums.to(grad.dtype))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Rows end to end [rows, width] to rows of the pack."""
        return x.index_select(0, self.last)

    def pick_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of rows end to end from that of the pack's."""
        return grad.index_select(0, self.gather) * self.used


class _Rearranged(torch.autograd.Function):
    """Rows rearranged by one method of :class:`SharedRows`, and their gradient by its counterpart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: RowMove, move_back: RowMove) -> torch.Tensor:
        ctx.move_back = move_back
        return move(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.move_back(grads[0].flatten(1)).view(-1, *grads[0].shape[1:]), None, None


@dataclass(frozen=True)
class PackSegments:
    """Boundaries of the segments of one pack, and how its sequences attend together."""

    cu_seqlens: torch.Tensor  # int32, on the model's device: of the sequences, shared prompts counted in each
    longest: int
    long: bool  # enough, on average, for a call of their own on a GPU
    shared: SharedRows | None  # where prompts are shared
    sequences: tuple[NDArray[np.int64], ...]  # rows of each
    exchange: HeadExchange | None = None  # where a rank computes some rows of the pack alone

    @classmethod
    def of(
        cls, cu_seqlens: Any, prefix: Any, device: torch.device | str, exchange: HeadExchange | None = None
    ) -> PackSegments:
        """From the boundaries and prefixes of a `MicroBatch`."""
        bounds, before = np.asarray(cu_seqlens, dtype=np.int64), np.asarray(prefix, dtype=np.int64)
        sequences = np.setdiff1d(
            np.arange(len(before)), before
        )  # a segment that others continue is no sequence itself
        heads = np.where(before[sequences] >= 0, np.diff(bounds)[before[sequences]], 0)
        lengths = heads + np.diff(bounds)[sequences]
        cu = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
        tails = np.repeat(bounds[sequences] - heads, lengths) + within
        flat = np.where(
            within < np.repeat(heads, lengths), np.repeat(bounds[before[sequences]], lengths) + within, tails
        )
        shared = SharedRows.of(flat, int(bounds[-1]), device) if len(sequences) < len(before) else None
        long = bool(cu[-1] >= LONG * len(lengths) > 0)
        on_device = to_device(cu.astype(np.int32), torch.device(device))
        return cls(on_device, int(lengths.max(initial=0)), long, shared, tuple(np.split(flat, cu[1:-1])), exchange)

    def tables(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the pack's rows [T, r] for rows end to end; made once for all layers."""
        if self.shared is None:
            return cos, sin
        memo = self.__dict__.setdefault("_tables", {})
        if (key := (cos.data_ptr(), cos.dtype)) not in memo:
            memo[key] = self.shared.spread(cos), self.shared.spread(sin)
        cosines, sines = memo[key]
        return cosines, sines

    @property
    def gather(self) -> torch.Tensor | None:
        """The pack's rows of all sequences end to end, where prompts are shared."""
        return None if self.shared is None else self.shared.gather

    @property
    def last(self) -> torch.Tensor | None:
        """With ``gather``: for each row of the pack a place where it lies."""
        return None if self.shared is None else self.shared.last

    @cached_property
    def runs(self) -> tuple[SequenceRun, ...]:
        """Calls that attend, where it is not one for all sequences."""
        device, lengths = self.cu_seqlens.device, list(map(len, self.sequences))
        on_cpu = device.type == "cpu"
        limit = ROWS if on_cpu else 0 if self.long else sum(lengths)
        covered = np.zeros(max((int(rows.max()) + 1 for rows in self.sequences if len(rows)), default=0), dtype=bool)
        ranges, fill = _neighbours(lengths, limit), self.long and not on_cpu
        return tuple(_run(list(self.sequences[a:b]), covered, device, fill) for a, b in ranges)


def _neighbours(lengths: list[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of sequences that are filled up together, wasting at most :data:`FILLING`, of at most ``limit`` rows."""
    ranges: list[tuple[int, int]] = []
    start, longest, total = 0, 0, 0
    for index, length in enumerate(lengths):
        top, real = max(longest, length), total + length
        filled = (index - start + 1) * top
        if index > start and (filled > limit or filled * (1 - FILLING) > real):
            ranges.append((start, index))
            start, top, real = index, length, length
        longest, total = top, real
    return [*ranges, (start, len(lengths))] if lengths else []


def _run(
    sequences: list[NDArray[np.int64]], covered: NDArray[np.bool_], device: torch.device | str, fill: bool = False
) -> SequenceRun:
    """One run; rows not yet ``covered`` get their output from it."""
    count, length = len(sequences), max(map(len, sequences))
    length = filled(length) if fill else length
    flat = np.concatenate(sequences)
    start, stop = int(flat[0]), int(flat[-1]) + 1
    short = length <= SHORT and torch.device(device).type == "cpu"
    future = torch.full((length, length), -math.inf).triu(1) if short else None
    if len(flat) == count * length == stop - start and (np.diff(flat) == 1).all() and not covered[flat].any():
        covered[flat] = True
        return SequenceRun(start, stop, count, length, None, None, None, future)
    whole_rows = np.stack([rows[np.minimum(np.arange(length), len(rows) - 1)] for rows in sequences]).ravel()
    rows, places = np.unique(whole_rows, return_index=True)  # the first place of each row
    new = ~covered[rows]
    covered[rows] = True
    gather, out_rows, out_places = (torch.as_tensor(x, device=device) for x in (whole_rows, rows[new], places[new]))
    return SequenceRun(start, stop, count, length, gather, out_rows, out_places, future)


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]`` [n, ...], whose gradient has the same bits every time, also where a row is taken more than once."""
    if not x.is_cuda:
        return x.index_select(0, rows)  # on a GPU its gradient is added up in no order
    return nn.functional.embedding(rows, x.flatten(1)).view(-1, *x.shape[1:])


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: PackSegments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each segment; query and key [1, heads, T, d], value [1, kv heads, T, dv].

    Returns [1, T, heads, dv]. With an ``exchange`` T are the rows of this rank.
    Dropout is ignored: log-probs of the policy have none. ``s_aux`` [heads] are sinks.

    Raises:
        TypeError: the model asks for something that is not plain causal attention.
    """
    odd = [name for name in ("position_bias",) if kwargs.get(name) is not None]
    if segments is None or attention_mask is not None or odd or not getattr(module, "is_causal", True):
        raise TypeError(f"{type(module).__name__} needs more than causal attention in segments: {odd or 'a mask'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    exchange = segments.exchange
    if exchange is not None:
        q, k, v = exchange.heads_of_all_rows(q, k, v)
        s_aux = exchange.own_heads(s_aux) if s_aux is not None else None
    if softcap is not None or s_aux is not None:
        out = _by_kernel(q, k, v, segments, scaling, sliding_window, softcap, s_aux)
    else:
        out = attend(q, k, v, segments, scaling, sliding_window)
    return (out if exchange is None else exchange.rows_of_all_heads(out, query.shape[1]))[None], None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: PackSegments,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each segment, [T, heads, dv]; q [T, heads, d], k and v [T, kv heads, d or dv]."""
    if by_varlen(q, segments, window):
        return _varlen(q, k, v, segments, scaling, window)
    if len(segments.runs) == 1 and segments.runs[0].rows is None:  # all rows as they lie
        return _attend(q, k, v, segments.runs[0], scaling, window).reshape(*q.shape[:2], -1)
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for run in segments.runs:
        run.put(_attend(q, k, v, run, scaling, window), out)
    return out


def by_varlen(x: torch.Tensor, segments: PackSegments, window: int | None = None) -> bool:
    """Whether all sequences of a pack are one call: on a GPU in half precision, unless a call each is cuDNN's."""
    half = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return half and (window is not None or not segments.long or not _cudnn(x))


def _cudnn(query: torch.Tensor) -> bool:
    """Whether torch takes its kernels; their gradients have not the same bits every time."""
    return has_cudnn(query.device) and not torch.are_deterministic_algorithms_enabled()


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: PackSegments,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    cu, longest = segments.cu_seqlens, segments.longest
    q, k, v = end_to_end(segments, q, k, v)
    return as_packed(segments, varlen(q, k, v, cu, cu, longest, longest, scale=scaling, window=window))


def end_to_end(segments: PackSegments, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Rows of whole sequences, those of shared prompts repeated in each."""
    if (shared := segments.shared) is None:
        return list(tensors)
    return [_Rearranged.apply(x, shared.spread, shared.spread_backward) for x in tensors]  # type: ignore[no-untyped-call]


def as_packed(segments: PackSegments, out: torch.Tensor) -> torch.Tensor:
    """Rows of the pack again."""
    if (shared := segments.shared) is None:
        return out
    return _Rearranged.apply(out, shared.pick, shared.pick_backward)  # type: ignore[no-untyped-call,no-any-return]


def _by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: PackSegments,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Soft caps and sinks, which torch's own kernels have not."""
    q, k, v = end_to_end(segments, q, k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    more: dict[str, Any] = {"window": window or 0, "softcap": softcap or 0.0, "sinks": sinks}
    out = varlen_attention(q, k, v, segments.cu_seqlens, segments.longest, scale=scale, **more)
    return as_packed(segments, out)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    run: SequenceRun,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """One run, [count, length, heads, d], from [T, heads, d]."""
    q, k, v = (run.fill(x).transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None and run.length > window:
        rows = torch.arange(run.length, device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < window)
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out.transpose(1, 2)


class Attention:
    """Attention of one run of a fused layer, forward and then backward, by heads: q [count, heads, length, d].

    Key and value heads are shared by neighbouring query heads. A short run is three products with a backward pass of
    its own; a longer one goes through torch's kernel and its backward.
    """

    def __init__(self, run: SequenceRun, scaling: float) -> None:
        self.run, self.scaling = run, scaling
        self.saved: tuple[torch.Tensor, ...] = ()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> torch.Tensor:
        """[count, heads, length, d]; with ``keep`` what the backward pass needs stays here."""
        if self.run.future is not None:
            return self._short(q, k, v, keep)
        with torch.set_grad_enabled(keep):
            q, k, v = (x.detach().requires_grad_(keep) for x in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scaling, enable_gqa=k.shape[1] != q.shape[1]
            )
        if keep:
            self.saved = (out, q, k, v)
        return out.detach()

    def backward(self, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v; what was kept is given back."""
        saved, self.saved = self.saved, ()
        if self.run.future is not None:
            return self._short_backward(d_out, *saved)
        out, *filled = saved
        return torch.autograd.grad(out, filled, d_out)

    def _short(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> torch.Tensor:
        assert self.run.future is not None
        group = q.shape[1] // k.shape[1]
        qf, kf, vf = self._grouped(q, k.shape[1]), k.flatten(0, 1), v.flatten(0, 1)
        future = self.run.future.to(q.dtype).repeat(group, 1)
        probs = torch.baddbmm(future, qf, kf.transpose(1, 2), alpha=self.scaling).softmax(-1)
        if keep:
            self.saved = (qf, kf, vf, probs)
        return torch.bmm(probs, vf).view(q.shape)

    def _short_backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count, length = self.run.count, self.run.length
        grouped = self._grouped(d_out, len(k) // count)
        d_v = torch.bmm(probs.transpose(1, 2), grouped)
        d_probs = torch.bmm(grouped, v.transpose(1, 2))
        d_scores = torch._softmax_backward_data(d_probs, probs, -1, probs.dtype).mul_(self.scaling)
        d_q, d_k = torch.bmm(d_scores, k), torch.bmm(d_scores.transpose(1, 2), q)
        return tuple(x.view(count, -1, length, x.shape[-1]) for x in (d_q, d_k, d_v))

    def _grouped(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[count, heads, length, d] to [count * kv heads, heads / kv heads * length, d]."""
        return x.reshape(self.run.count * kv_heads, -1, x.shape[-1])


def register() -> None:
    """Make :func:`segment_attention` known to transformers, with no mask; calling again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(segment_attention))  # compiled callers call it as it is
