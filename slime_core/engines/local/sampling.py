"""Sampling of one token a row, with its log-prob under the drawn and the plain distribution.

    logits -> / temperature -> top-k -> top-p -> softmax -> running sum -> first id above u * total

``u`` is a hash of (request seed, absolute position), so a draw depends on nothing but its own row. Every step is a
row-wise kernel: an elementwise exp or log over the whole matrix would round the tail of a thread's share differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) a row, a function of its seed and position: splitmix64 (Steele et al. 2014), twice."""
    bits = _mix(_mix(seeds + GOLDEN) + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(slots=True)
class Knobs:
    """How each of R rows is drawn; host arrays of length R."""

    temperature: NDArray[np.float32]  # 0 is greedy
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]  # 0 is off


@dataclass(slots=True)
class SampledTokens:
    """One entry a row; a row whose logits are not finite has a NaN in ``plain_log_probs``."""

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    plain_log_probs: NDArray[np.float32]


def draw(logits: torch.Tensor, knobs: Knobs | None, u: NDArray[np.float64]) -> SampledTokens:
    """Draw a token a row by inverse transform; ``logits`` is [R, V] and ``u`` holds R numbers in [0, 1).

    Without ``knobs`` all rows are at temperature 1 and nothing is left out.
    """
    plain = logits.float()
    plain_logp = torch.log_softmax(plain, -1)
    if knobs is None:
        chosen = _inverse(torch.softmax(plain, -1), u)
        log_probs = plain_logp.gather(-1, chosen).cpu().numpy()[:, 0]
        return SampledTokens(chosen.cpu().numpy()[:, 0], log_probs, log_probs)
    greedy = knobs.temperature == 0
    heat = torch.from_numpy(np.where(greedy, np.float32(1), knobs.temperature)).to(plain.device)
    shaped = _truncate(plain / heat[:, None], knobs)
    logp = torch.log_softmax(shaped, -1)
    if greedy.all():
        chosen = shaped.argmax(-1, keepdim=True)
    else:
        chosen = _inverse(torch.softmax(shaped, -1), u)
        if greedy.any():
            pick = torch.from_numpy(greedy).to(plain.device)[:, None]
            chosen = torch.where(pick, shaped.argmax(-1, keepdim=True), chosen)
    tokens = chosen[:, 0].cpu().numpy()
    log_probs = logp.gather(-1, chosen)[:, 0].cpu().numpy()
    plain_log_probs = plain_logp.gather(-1, chosen)[:, 0].cpu().numpy()
    return SampledTokens(tokens, np.where(greedy, np.float32(0), log_probs), plain_log_probs)


def _inverse(probs: torch.Tensor, u: NDArray[np.float64]) -> torch.Tensor:
    total = torch.cumsum(probs, -1, dtype=torch.float64)
    goal = torch.from_numpy(u).to(probs.device)[:, None] * total[:, -1:]
    return torch.searchsorted(total, goal, right=True).clamp_(max=probs.shape[-1] - 1)


def _truncate(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Set what top-k, then top-p over the rest, leaves out to -inf. Rows without either keep every bit."""
    rows = np.flatnonzero((knobs.top_p < 1) | (knobs.top_k > 0))
    if not len(rows):
        return logits
    at = torch.from_numpy(rows).to(logits.device)
    ranked, ids = logits[at].sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    k = np.where(knobs.top_k[rows] > 0, knobs.top_k[rows], vocab)
    rank = torch.arange(vocab, device=logits.device)
    ranked = ranked.masked_fill(rank >= torch.from_numpy(k).to(logits.device)[:, None], -torch.inf)
    probs = torch.softmax(ranked, -1)
    before = torch.cumsum(probs, -1, dtype=torch.float64) - probs
    p = torch.from_numpy(knobs.top_p[rows].astype(np.float64)).to(logits.device)[:, None]
    ranked = ranked.masked_fill((before >= p) & (p < 1) & (rank > 0), -torch.inf)
    out = logits.clone()
    out[at] = torch.empty_like(ranked).scatter_(-1, ids, ranked)
    return out
