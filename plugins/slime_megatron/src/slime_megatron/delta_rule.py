"""The gated delta rule over sequences that lie end to end, and the short convolution before it. Pure functions.

A head's state is a matrix S that maps keys to values. Token t lets it fade, replaces what it holds for the token's
key, and reads it (Gated Delta Networks, arXiv:2412.06464, equation 10; here S is [d of k, d of v]):

    S_t = a_t (I - b_t k_t k_t') S_(t-1) + b_t k_t v_t'          o_t = S_t' q_t

In chunks of C tokens (section 3.3) only the state between chunks is computed one after the other. With g_i the product
of the fadings from the chunk's start to token i, and S the state before the chunk:

    L_ij = b_i (g_i / g_j) k_i k_j', j < i       [U | W] = (I + L)^-1 [b v | b g k]       D = U - W S
    o_i = g_i q_i' S + sum over j <= i of (g_i / g_j) (q_i' k_j) D_j        S <- g_C S + sum of (g_C / g_j) k_j D_j'
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import conv1d

CHUNK = 64
EPSILON = 1e-6
"""Under the root of queries' and keys' norms, as the published models have it."""


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fading: torch.Tensor,
    strength: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """What each token reads, [T, heads, d of v] in the dtype of ``v``; float32 inside.

    Args:
        q, k: [T, heads, d of k]; brought to norm 1, and q divided by the root of d.
        v: [T, heads, d of v].
        fading: log of a_t, [T, heads], at most 0.
        strength: b_t, [T, heads], 0 to 1.
        lengths: of the sequences, in order; each starts with a state of zeros. Their sum is T.
    """
    counts = [-(-length // CHUNK) for length in lengths]
    rows = torch.cat(
        [torch.arange(n) + CHUNK * before for n, before in zip(lengths, _starts(counts), strict=True)]
    ).to(v.device)

    def chunked(x: torch.Tensor) -> torch.Tensor:  # [T, heads, ...] to [chunks, heads, CHUNK, ...]; filling is 0
        filled = torch.zeros(CHUNK * sum(counts), *x.shape[1:], device=x.device).index_copy(0, rows, x.float())
        return filled.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    scale = q.shape[-1] ** -0.5
    q, k, values, fading, strength = map(chunked, (_unit(q) * scale, _unit(k), v, fading, strength))
    total = fading.cumsum(-1)[..., None]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    weighted = strength[..., None] * k
    solved = torch.linalg.solve_triangular(
        weighted @ k.transpose(-1, -2) * between,
        torch.cat([strength[..., None] * values, weighted * total.exp()], dim=-1),
        upper=False,
        unitriangular=True,
    )
    written, recalled = solved.split([values.shape[-1], k.shape[-1]], dim=-1)
    inside, reading = q @ k.transpose(-1, -2) * between, q * total.exp()
    keys, decay = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2), total[..., -1:, :].exp()
    outputs, firsts = [], set(_starts(counts))
    for n in range(sum(counts)):
        if n in firsts:
            state = values.new_zeros(values.shape[1], k.shape[-1], values.shape[-1])
        new = written[n] - recalled[n] @ state
        outputs.append(reading[n] @ state + inside[n] @ new)
        state = decay[n] * state + keys[n] @ new
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1).index_select(0, rows).to(v.dtype)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Each channel with a kernel of its own over the tokens up to each, of its own sequence alone; [T, channels].

    Args:
        x: [T, channels].
        weight: [channels, 1, width]; the last number is the token's own.
        lengths: of the sequences, in order.
    """
    before = weight.shape[-1] - 1  # zeros in front of each sequence
    starts = _starts([length + before for length in lengths])
    rows = torch.cat([torch.arange(n) + start for n, start in zip(lengths, starts, strict=True)]).to(x.device)
    spread = x.new_zeros(len(x) + before * len(lengths), x.shape[1]).index_copy(0, rows + before, x)
    return conv1d(spread.t()[None], weight, groups=len(weight))[0].t().index_select(0, rows)


def _starts(counts: Sequence[int]) -> list[int]:
    """Where each of some runs begins, end to end."""
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return [start for start, _ in pairwise(ends)]


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
