"""Packed queries, keys and values in, attention within each sequence out: no padding between layers, no [T, T] mask.

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
from numpy.typing import NDArray
from torch import nn

NAME = "slime_segments"
FILLING = 0.125  # of a batched call's rows, at most
ROWS = 2048  # of a run on a CPU: what is made of them stays in its caches, and calls do not add up
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

    @property
    def rows(self) -> slice:
        """The run's rows of the pack."""
        return slice(self.start, self.stop)

    def fill(self, mine: torch.Tensor) -> torch.Tensor:
        """The run's rows [stop - start, ...] to [count, length, ...]; filled places repeat a row."""
        if self.gather is not None:
            mine = mine.index_select(0, self.gather)
        return mine.reshape(self.count, self.length, *mine.shape[1:])

    def fill_gradient(self, mine: torch.Tensor) -> torch.Tensor:
        """As :meth:`fill`, with 0 in filled places."""
        if self.scatter is None:
            return self.fill(mine)
        filled = mine.new_zeros(self.count * self.length, *mine.shape[1:])
        return filled.index_copy_(0, self.scatter, mine).view(self.count, self.length, *mine.shape[1:])

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
        limit = ROWS if torch.device(device).type == "cpu" else int(bounds[-1])
        runs = tuple(_run(bounds, a, b, lengths, device) for a, b in _neighbours(lengths, limit))
        return cls(cu_seqlens=tensor, longest=max(lengths, default=0), runs=runs)


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


def _run(bounds: NDArray[np.int64], first: int, last: int, lengths: list[int], device: torch.device | str) -> Run:
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
    if k.shape[1] != q.shape[1]:  # varlen_attn knows grouped heads from torch 2.12 on only
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, scaling: float | None, window: int | None = None
) -> torch.Tensor:
    """One run, [stop - start, heads, d], from [T, heads, d]."""
    q, k, v = (run.fill(x[run.rows]).transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None and run.length > window:
        rows = torch.arange(run.length, device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < window)
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )
    return run.unfill(out.transpose(1, 2))


class Attention:
    """Attention of one run of a fused layer, forward and then backward, by heads: q [count, heads, length, d].

    Key and value heads are shared by neighbouring query heads. A short run is three products with a backward pass of
    its own; a longer one goes through torch's kernel and its backward.
    """

    def __init__(self, run: Run, scaling: float) -> None:
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

    AttentionInterface.register(NAME, segment_attention)
