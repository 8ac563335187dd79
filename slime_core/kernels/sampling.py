"""Sampling of one token a row, with its log-prob under the drawn and the plain distribution.

    logits -> / temperature -> top-k -> top-p -> softmax -> running sum -> first id above u * total

``u`` is a hash of (request seed, absolute position), so a draw depends on nothing but its own row. Each step of
:func:`draw` is a row-wise kernel: an elementwise exp or log over the whole matrix would round the tail of a thread's
share differently.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slime_core.kernels import by_triton

Tensor = torch.Tensor
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIXERS = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))


class Sampled(NamedTuple):
    """One entry a row; a row whose logits are not finite has a NaN in ``plain_log_probs``."""

    tokens: Tensor  # int64
    log_probs: Tensor  # float32, under the distribution drawn from; 0 where greedy
    plain_log_probs: Tensor  # float32, under softmax(logits)


class Knobs(NamedTuple):
    """How each of R rows is drawn."""

    temperature: Tensor  # [R] float32; 0 is greedy, the lowest id among equals
    top_k: Tensor  # [R] int64; 0 is off
    top_p: Tensor  # [R] float32; 1 is off


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Sampled:
    """Draw a token a row by inverse transform.

    Equal logits rank by id. On a GPU, sums are taken in another order than on a CPU: a draw, or a token at the edge
    of top-p, may differ where two numbers agree but for rounding.

    Args:
        logits: [R, V]
        seeds: [R] int64, the bits of unsigned seeds
        positions: [R] int64, absolute position of the token to draw
        temperature: [R] float32; 0 is greedy, the lowest id among equals
        top_k: [R] int64; 0 is off
        top_p: [R] float32; 1 is off
    """
    if by_triton(logits):
        from slime_core.kernels.sampling_cuda import sample as kernel

        return Sampled(*kernel(logits, seeds, positions, temperature, top_k, top_p))
    return draw(logits, uniforms(seeds, positions), Knobs(temperature, top_k, top_p))


def draw(logits: Tensor, u: Tensor, knobs: Knobs | None) -> Sampled:
    """Draw a token a row from logits [R, V] by inverse transform of ``u``, [R] float64 in [0, 1).

    Without ``knobs`` all rows are at temperature 1 and nothing is left out.
    """
    plain = logits.float()
    plain_logp = torch.log_softmax(plain, -1)
    if knobs is None:
        tokens = _inverse(torch.softmax(plain, -1), u)
        log_probs = plain_logp.gather(-1, tokens)[:, 0]
        return Sampled(tokens[:, 0], log_probs, log_probs)
    greedy = knobs.temperature == 0
    shaped = _truncate(plain / torch.where(greedy, 1.0, knobs.temperature)[:, None], knobs)
    tokens = shaped.argmax(-1, keepdim=True)
    if not greedy.all():
        tokens = torch.where(greedy[:, None], tokens, _inverse(torch.softmax(shaped, -1), u))
    log_probs = torch.log_softmax(shaped, -1).gather(-1, tokens)[:, 0]
    return Sampled(tokens[:, 0], torch.where(greedy, 0.0, log_probs), plain_logp.gather(-1, tokens)[:, 0])


def log_softmax_at(logits: Tensor, ids: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-prob of one id a row, float32 [R], with the arithmetic of :func:`sample` without top-k and top-p.

    Args:
        logits: [R, V]
        ids: [R] int64
        temperature: [R] float32; None is 1, and 0 reads as 1
    """
    if by_triton(logits):
        from slime_core.kernels.sampling_cuda import log_softmax_at as kernel

        return kernel(logits, ids, temperature)
    plain = logits.float()
    return _at(plain if temperature is None else plain / torch.where(temperature == 0, 1.0, temperature)[:, None], ids)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) a row, a function of its seed and position: splitmix64 (Steele et al. 2014), twice."""
    return _shift(_mix(_mix(seeds + GOLDEN) + GOLDEN * (positions + 1)), 12).double() * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    for bits, factor in MIXERS:
        x = (x ^ _shift(x, bits)) * factor
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros, of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _at(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]


def _inverse(probs: Tensor, u: Tensor) -> Tensor:
    total = torch.cumsum(probs, -1, dtype=torch.float64)
    goal = u[:, None] * total[:, -1:]
    return torch.searchsorted(total, goal, right=True).clamp_(max=probs.shape[-1] - 1)


def _truncate(logits: Tensor, knobs: Knobs) -> Tensor:
    """Set what top-k, then top-p over the rest, leaves out to -inf. Rows without either keep every bit."""
    rows = ((knobs.top_p < 1) | (knobs.top_k > 0)).nonzero()[:, 0]
    if not len(rows):
        return logits
    ranked, ids = logits[rows].sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    top_k, p = knobs.top_k[rows, None], knobs.top_p[rows, None].double()
    rank = torch.arange(vocab, device=logits.device)
    ranked = ranked.masked_fill(rank >= torch.where(top_k > 0, top_k, vocab), -torch.inf)
    probs = torch.softmax(ranked, -1)
    before = torch.cumsum(probs, -1, dtype=torch.float64) - probs
    ranked = ranked.masked_fill((before >= p) & (p < 1) & (rank > 0), -torch.inf)
    out = logits.clone()
    out[rows] = torch.empty_like(ranked).scatter_(-1, ids, ranked)
    return out
