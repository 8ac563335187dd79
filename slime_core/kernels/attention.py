"""Causal attention over a paged cache, and over packed sequences with gradients.

Both take grouped queries, a sliding window, a soft cap and sinks. With ``invariant`` a row's bits depend on its own
sequence alone, and are the same whether it is decoded, prefilled or trained on.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from slime_core.kernels import by_triton
from slime_core.kernels.attention_batch import AttentionBatch as AttentionBatch, ScoreForm

Tensor = torch.Tensor

SCORES = 1 << 24
"""Scores that the reference has in memory at once, unless one row has more."""


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Attend with ``query`` [N, Hq, D], whose keys and values are already in their pages: [N, Hq, Dv].

    Decode rows, whole prompts and chunks of prompts may stand in one batch. Heads of up to 256 numbers fit a GPU.

    Args:
        keys: [P, page, Hkv, D]
        values: [P, page, Hkv, Dv]
        window: keys that a row sees, itself included; 0 is all
        softcap: bound of the scores by tanh; 0 is none
        sinks: [Hq], logits of a column without a value
        invariant: bits of a row do not depend on the other rows, nor on how its sequence was cut into calls
    """
    form = ScoreForm(scale, window, softcap)
    if by_triton(query):
        from slime_core.kernels.attention_cuda import paged

        return paged(query, keys, values, batch, form, sinks, invariant)
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    bounds = batch.cu_rows.tolist()
    for table, length, begin, end in zip(batch.tables, batch.lengths.tolist(), bounds, bounds[1:]):
        pages = table[: -(-length // keys.shape[1])]
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
        out[begin:end] = _attend(query[begin:end], k, v, form, sinks)
    return out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Attend within packed sequences, with gradients for query, key, value and sinks: [N, Hq, Dv].

    The backward pass sums in a fixed order: it repeats bit for bit.

    Args:
        query: [N, Hq, D]
        key: [N, Hkv, D]
        value: [N, Hkv, Dv]
        cu_seqlens: [S + 1] int32, from 0 to N
        longest: bound of the sequences' lengths
        window, softcap, sinks: as for :func:`paged_attention`
        invariant: the output has the bits of :func:`paged_attention` with ``invariant``
    """
    form = ScoreForm(scale, window, softcap)
    if by_triton(query):
        from slime_core.kernels.attention_gradient import varlen

        return varlen(query, key, value, cu_seqlens, form, sinks, invariant)
    bounds = cu_seqlens.tolist()
    parts = [slice(*pair) for pair in pairwise(bounds)]
    return torch.cat([_attend(query[at], key[at], value[at], form, sinks) for at in parts])


def _attend(query: Tensor, key: Tensor, value: Tensor, form: ScoreForm, sinks: Tensor | None) -> Tensor:
    """Reference for one sequence: the last rows of ``key`` [L, Hkv, D] are those of ``query`` [n, Hq, D].

    Rows are halved until there are few scores at once.
    """
    if len(query) > 1 and query.shape[1] * len(query) * len(key) > SCORES:
        half = len(query) // 2
        end = len(key) - len(query) + half
        parts = (query[:half], key[:end], value[:end]), (query[half:], key, value)
        return torch.cat([_attend(*part, form, sinks) for part in parts])
    group = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), *(one.to(wide).repeat_interleave(group, 1) for one in (key, value))
    scores = torch.einsum("ihd,jhd->hij", q, k) * form.scale
    if form.softcap:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    column = torch.arange(len(key), device=key.device)
    position = column[len(key) - len(query) :, None]
    hidden = column > position
    if form.window:
        hidden |= column <= position - form.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.to(wide)[:, None, None].expand(-1, len(query), 1)
        weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hij,jhd->ihd", weights, v).to(query.dtype)
