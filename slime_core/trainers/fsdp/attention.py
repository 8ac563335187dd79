"""Packed queries, keys and values in, attention within each sequence out: nothing padded, no [T, T] mask anywhere.

Registered with transformers' `AttentionInterface`; the sequences' boundaries travel to it as the keyword argument
``segments`` of the model's forward. On a GPU in half precision it is one varlen flash call; elsewhere sequences of
equal length, which packs keep side by side, are one batched call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

NAME = "slime_segments"


@dataclass(slots=True, frozen=True)
class Segments:
    """Boundaries of the sequences of one pack.

    Example: lengths 4, 4, 2 give cu_seqlens [0, 4, 8, 10] and runs ((0, 2, 4), (8, 1, 2))
    """

    cu_seqlens: torch.Tensor  # n + 1, int32, on the model's device
    runs: tuple[tuple[int, int, int], ...]  # (first row, sequences, length) of neighbours of equal length
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Any, device: torch.device | str) -> Segments:
        """From the boundaries of a `MicroBatch`."""
        runs: list[tuple[int, int, int]] = []
        lengths = np.diff(cu_seqlens).tolist()
        for start, length in zip(np.asarray(cu_seqlens).tolist(), lengths):
            if runs and runs[-1][2] == length:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
            else:
                runs.append((start, 1, length))
        tensor = torch.as_tensor(np.asarray(cu_seqlens, dtype=np.int32), device=device)
        return cls(cu_seqlens=tensor, runs=tuple(runs), longest=max(lengths, default=0))


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
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, segments, scaling, sliding_window), None
    parts = [_run(query, key, value, run, scaling, sliding_window) for run in segments.runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    cu, longest = segments.cu_seqlens, segments.longest
    out = varlen_attn(
        q, k, v, cu, cu, longest, longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out[None]


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: tuple[int, int, int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    start, count, length = run
    q, k, v = (_batched(x, start, count, length) for x in (query, key, value))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = None
    if window is not None and length > window:
        rows = torch.arange(length, device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < window)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).reshape(count * length, q.shape[1], q.shape[3])


def _batched(x: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """[1, heads, T, d] to [count, heads, length, d]."""
    rows = x[0, :, start : start + count * length]
    return rows.reshape(x.shape[1], count, length, x.shape[3]).transpose(0, 1)


def register() -> None:
    """Make :func:`segment_attention` known to transformers, with no mask; calling again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, segment_attention)
