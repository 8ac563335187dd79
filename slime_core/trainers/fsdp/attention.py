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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slime_core.kernels.attention import varlen_attention
from slime_core.trainers.flash import filled, has_cudnn, varlen

NAME = "slime_segments"
FILLING = 0.125  # of a batched call's rows, at most
ROWS = 2048  # of a run on a CPU: what is made of them stays in its caches, and calls do not add up
LONG = 1024  # tokens of a mean sequence from which a call each costs nothing on a GPU
SHORT = 128  # tokens up to which plain products beat the flash kernel on a CPU


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
class PackSegments:
    """Boundaries of the segments of one pack, and how its sequences attend together."""

    cu_seqlens: torch.Tensor  # int32, on the model's device: of the sequences, shared prompts counted in each
    longest: int
    long: bool  # enough, on average, for a call of their own on a GPU
    gather: torch.Tensor | None  # rows of all sequences end to end, where prompts are shared
    last: torch.Tensor | None  # with ``gather``: for each row of the pack a place where it lies
    runs: tuple[SequenceRun, ...]

    @classmethod
    def of(cls, cu_seqlens: Any, prefix: Any, device: torch.device | str) -> PackSegments:
        """From the boundaries and prefixes of a `MicroBatch`."""
        bounds, before = np.asarray(cu_seqlens, dtype=np.int64), np.asarray(prefix, dtype=np.int64)
        whole = np.setdiff1d(np.arange(len(before)), before)  # a segment that others continue is no sequence itself
        spans = [(bounds[before[i]], bounds[before[i] + 1]) if before[i] >= 0 else (0, 0) for i in whole]
        sequences = [
            np.concatenate([np.arange(*span), np.arange(bounds[i], bounds[i + 1])]) for span, i in zip(spans, whole)
        ]
        lengths = [len(rows) for rows in sequences]
        shared = len(whole) < len(before)
        on_cpu, long = torch.device(device).type == "cpu", sum(lengths) >= LONG * len(lengths) > 0
        limit = ROWS if on_cpu else 0 if long else sum(lengths)
        covered = np.zeros(int(bounds[-1]), dtype=bool)
        fill = long and not on_cpu
        runs = tuple(_run(sequences[a:b], covered, device, fill) for a, b in _neighbours(lengths, limit))
        gather = last = None
        if shared:
            flat = np.concatenate(sequences)
            places = np.zeros(len(covered), dtype=np.int64)
            places[flat] = np.arange(len(flat))
            gather, last = torch.as_tensor(flat, device=device), torch.as_tensor(places, device=device)
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(torch.as_tensor(cu, device=device), max(lengths, default=0), long, gather, last, runs)


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

    Returns [1, T, heads, dv]. Dropout is ignored: log-probs of the policy have none. ``s_aux`` [heads] are sinks.

    Raises:
        TypeError: the model asks for something that is not plain causal attention.
    """
    odd = [name for name in ("position_bias",) if kwargs.get(name) is not None]
    if segments is None or attention_mask is not None or odd or not getattr(module, "is_causal", True):
        raise TypeError(f"{type(module).__name__} needs more than causal attention in segments: {odd or 'a mask'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if softcap is not None or s_aux is not None:
        return _by_kernel(q, k, v, segments, scaling, sliding_window, softcap, s_aux)[None], None
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if half and (sliding_window is not None or not segments.long or not _cudnn(query)):
        return _varlen(q, k, v, segments, scaling, sliding_window)[None], None
    if len(segments.runs) == 1 and segments.runs[0].rows is None:  # all rows as they lie
        return _attend(q, k, v, segments.runs[0], scaling, sliding_window).reshape(1, *q.shape[:2], -1), None
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for run in segments.runs:
        run.put(_attend(q, k, v, run, scaling, sliding_window), out)
    return out[None], None


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
    q, k, v = _end_to_end(segments, q, k, v)
    out = varlen(q, k, v, cu, cu, longest, longest, scale=scaling, window=window)
    return out if segments.last is None else out.index_select(0, segments.last)


def _end_to_end(segments: PackSegments, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Rows of whole sequences, those of shared prompts repeated in each."""
    return [x if segments.gather is None else take(x, segments.gather) for x in tensors]


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
    q, k, v = _end_to_end(segments, q, k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    more: dict[str, Any] = {"window": window or 0, "softcap": softcap or 0.0, "sinks": sinks}
    out = varlen_attention(q, k, v, segments.cu_seqlens, segments.longest, scale=scale, **more)
    return out if segments.last is None else out.index_select(0, segments.last)


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
