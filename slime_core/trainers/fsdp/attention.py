"""Packed queries, keys and values in, attention within each sequence out: nothing padded between layers, no [T, T] mask.

Neighbouring sequences of about the same length, which packs keep side by side, are one batched call. Inside such a
call a shorter one is filled up to the longest; causality hides the filling, so no mask is needed for it either.
On a GPU in half precision everything is one varlen flash call.

:func:`segment_attention` is registered with transformers' `AttentionInterface`; the boundaries travel to it as the
keyword argument ``segments`` of the model's forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

NAME = "slime_segments"
FILLING = 0.125  # of a batched call's rows, at most
SHORT = 128  # tokens up to which plain products beat the flash kernel on a CPU


@dataclass(slots=True, frozen=True)
class Run:
    """Neighbours that attend in one call: rows ``start`` to ``stop``, ``count`` sequences of at most ``length``.

    ``gather`` [count * length] and ``scatter`` [stop - start] lead to the filled form and back, None where all have
    the same length. ``future`` [length, length] is -inf above the diagonal, for short runs on a CPU.
    """

    start: int
    stop: int
    count: int
    length: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    future: torch.Tensor | None

    def fill(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [count, length, ...]; filled places repeat some row."""
        mine = rows[self.start : self.stop]
        if self.gather is not None:
            mine = mine.index_select(0, self.gather)
        return mine.reshape(self.count, self.length, *rows.shape[1:])

    def unfill(self, filled: torch.Tensor) -> torch.Tensor:
        """[count, length, ...] to [stop - start, ...]."""
        rows = filled.reshape(self.count * self.length, *filled.shape[2:])
        return rows if self.scatter is None else rows.index_select(0, self.scatter)


@dataclass(slots=True, frozen=True)
class Segments:
    """Boundaries of the sequences of one pack, and how they attend together."""

    cu_seqlens: torch.Tensor  # n + 1, int32, on the model's device
    longest: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, cu_seqlens: Any, device: torch.device | str) -> Segments:
        """From the boundaries of a `MicroBatch`."""
        bounds = np.asarray(cu_seqlens, dtype=np.int64)
        lengths = np.diff(bounds).tolist()
        tensor = torch.as_tensor(bounds.astype(np.int32), device=device)
        runs = tuple(_run(bounds, a, b, lengths, device) for a, b in _neighbours(lengths))
        return cls(cu_seqlens=tensor, longest=max(lengths, default=0), runs=runs)


def _neighbours(lengths: list[int]) -> list[tuple[int, int]]:
    """Ranges of sequences that are filled up together, each wasting at most :data:`FILLING`."""
    ranges: list[tuple[int, int]] = []
    start, longest, total = 0, 0, 0
    for index, length in enumerate(lengths):
        top, real = max(longest, length), total + length
        if index > start and (index - start + 1) * top * (1 - FILLING) > real:
            ranges.append((start, index))
            start, top, real = index, length, length
        longest, total = top, real
    return [*ranges, (start, len(lengths))] if lengths else []


def _run(bounds: np.ndarray, first: int, last: int, lengths: list[int], device: torch.device | str) -> Run:
    start, stop, count = int(bounds[first]), int(bounds[last]), last - first
    mine = np.array(lengths[first:last])
    length = int(mine.max())
    gather = scatter = None
    if (mine != length).any():
        within = np.minimum(np.arange(length)[None, :], mine[:, None] - 1)
        gather = torch.as_tensor((bounds[first:last, None] - start + within).ravel(), device=device)
        scatter = torch.as_tensor(np.flatnonzero((np.arange(length)[None, :] < mine[:, None]).ravel()), device=device)
    short = length <= SHORT and torch.device(device).type == "cpu"
    future = torch.full((length, length), -math.inf).triu(1) if short else None
    return Run(start, stop, count, length, gather, scatter, future)


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each segment; query [1, heads, T, d], key and value [1, kv heads, T, d].

    Returns [1, T, heads, d]. Dropout is ignored: log-probs of the policy have none.

    Raises:
        TypeError: the model asks for something that is not plain causal attention.
    """
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if segments is None or attention_mask is not None or odd or not getattr(module, "is_causal", True):
        raise TypeError(f"{type(module).__name__} needs more than causal attention in segments: {odd or 'a mask'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(q, k, v, segments, scaling, sliding_window)[None], None
    parts = [_attend(q, k, v, run, scaling, sliding_window) for run in segments.runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scaling: float | None, window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = segments.cu_seqlens, segments.longest
    out = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, scaling: float | None, window: int | None = None
) -> torch.Tensor:
    """One run, [stop - start, heads, d], from [T, heads, d]."""
    filled = [run.fill(x).transpose(1, 2) for x in (q, k, v)]
    mask = None
    if window is not None and run.length > window:
        rows = torch.arange(run.length, device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < window)
    out = nn.functional.scaled_dot_product_attention(
        *filled, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )
    return run.unfill(out.transpose(1, 2))


class Attention:
    """Attention of a fused layer, forward and then backward; q, k and v are [T, heads, d], k and v share heads.

    Short runs are three products with their own backward; longer ones go through torch's kernel and its backward.
    """

    def __init__(self, segments: Segments, scaling: float) -> None:
        self.segments, self.scaling = segments, scaling
        self.saved: list[tuple[torch.Tensor, ...]] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> torch.Tensor:
        """[T, heads, d]; with ``keep`` what the backward pass needs stays here."""
        self.saved = []
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for run in self.segments.runs:
            done = self._short(q, k, v, run, keep) if run.future is not None else self._long(q, k, v, run, keep)
            out[run.start : run.stop] = done
        return out

    def backward(self, d_out: torch.Tensor, d_q: torch.Tensor, d_k: torch.Tensor, d_v: torch.Tensor) -> None:
        """Fill the gradients [T, heads, d]; what was kept is given back."""
        for run, saved in zip(self.segments.runs, self.saved, strict=True):
            part = slice(run.start, run.stop)
            grads = self._short_backward(d_out, run, *saved) if run.future is not None else _long_backward(d_out, run, *saved)
            for target, grad in zip((d_q, d_k, d_v), grads):
                target[part] = run.unfill(grad)
        self.saved = []

    def _short(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, keep: bool) -> torch.Tensor:
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        group, batch = heads // kv_heads, run.count * kv_heads
        qf = run.fill(q).transpose(1, 2).reshape(batch, group * run.length, dim)
        kf, vf = (run.fill(x).transpose(1, 2).reshape(batch, run.length, dim) for x in (k, v))
        assert run.future is not None
        future = run.future.to(q.dtype).repeat(group, 1)
        probs = torch.baddbmm(future, qf, kf.transpose(1, 2), alpha=self.scaling).softmax(-1)
        out = torch.bmm(probs, vf).view(run.count, heads, run.length, dim).transpose(1, 2)
        if keep:
            self.saved.append((qf, kf, vf, probs))
        return run.unfill(out)

    def _short_backward(
        self, d_out: torch.Tensor, run: Run, qf: torch.Tensor, kf: torch.Tensor, vf: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        filled = _filled_gradient(d_out, run)
        d_filled = filled.transpose(1, 2).reshape(qf.shape)
        d_v = torch.bmm(probs.transpose(1, 2), d_filled)
        d_scores = torch.bmm(d_filled, vf.transpose(1, 2))
        d_scores = torch._softmax_backward_data(d_scores, probs, -1, probs.dtype).mul_(self.scaling)
        d_q, d_k = torch.bmm(d_scores, kf), torch.bmm(d_scores.transpose(1, 2), qf)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.view(run.count, -1, run.length, x.shape[-1]).transpose(1, 2)

        return rows(d_q), rows(d_k), rows(d_v)

    def _long(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, keep: bool) -> torch.Tensor:
        with torch.set_grad_enabled(keep):
            filled = [run.fill(x).transpose(1, 2).requires_grad_(keep) for x in (q, k, v)]
            out = nn.functional.scaled_dot_product_attention(
                *filled, is_causal=True, scale=self.scaling, enable_gqa=k.shape[1] != q.shape[1]
            )
        if keep:
            self.saved.append((out, *filled))
        return run.unfill(out.detach().transpose(1, 2))


def _long_backward(
    d_out: torch.Tensor, run: Run, out: torch.Tensor, *filled: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    d_filled = _filled_gradient(d_out, run)
    return tuple(g.transpose(1, 2) for g in torch.autograd.grad(out, filled, d_filled.transpose(1, 2)))


def _filled_gradient(d_out: torch.Tensor, run: Run) -> torch.Tensor:
    """[count, length, heads, d], 0 in filled places."""
    if run.scatter is None:
        return run.fill(d_out)
    filled = d_out.new_zeros(run.count * run.length, *d_out.shape[1:])
    filled[run.scatter] = d_out[run.start : run.stop]
    return filled.view(run.count, run.length, *d_out.shape[1:])


def register() -> None:
    """Make :func:`segment_attention` known to transformers, with no mask; calling again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, segment_attention)
