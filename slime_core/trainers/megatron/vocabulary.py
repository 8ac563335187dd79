"""Log-probs and entropies from hidden states, the vocabulary split over tensor-parallel ranks, logits never whole.

    hidden [R, h] --chunks of rows--> logits of this rank's ids --max, sums over ranks--> log-prob, entropy [R]

With z the logits over the temperature, m their maximum and s = sum exp(z - m): log-prob = z[target] - m - log s, and
entropy = m + log s - sum p z. The gradient of z is (onehot - p) for the log-prob and -p (z - m - log s + entropy) for
the entropy. Logits are made again in the backward pass; sums are in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime_core.algo.logprobs import LOGITS, blocks, linear_log_probs


@dataclass(slots=True, frozen=True)
class Slice:
    """The ids whose rows of the output matrix a rank holds: from ``first`` on; those from ``vocab`` on are filling."""

    first: int
    vocab: int
    group: Any = None  # of tensor-parallel ranks

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return dist.get_world_size(self.group) if self.group is not None else 1


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    part: Slice,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy, float32 [R]; the same on every tensor-parallel rank.

    Args:
        hidden: [R, h], whole on every rank; its gradient is this rank's share, to be summed over ranks
        weight: [V / ranks, h], this rank's rows of the output matrix
        target: [R], ids
        temperature: [R], or None for 1
        chunk: rows whose logits are there at a time, at most; 0 is as many as `logprobs.LOGITS` bytes hold
    """
    if part.ranks == 1:
        weight = weight if part.vocab >= len(weight) else weight[: part.vocab]
        return linear_log_probs(hidden, weight, target, temperature=temperature, chunk=chunk)
    found: tuple[torch.Tensor, torch.Tensor] = _LogProbs.apply(hidden, weight, target, temperature, part, chunk)
    return found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor | None,
        part: Slice,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob = torch.empty(len(target), dtype=torch.float32, device=hidden.device)
        entropy, log_sum = torch.empty_like(log_prob), torch.empty_like(log_prob)
        for rows in _chunks(len(target), weight, chunk):
            z = _logits(hidden[rows], weight, temperature[rows] if temperature is not None else None, part)
            top = _reduce(z.max(dim=1).values, part, dist.ReduceOp.MAX)
            inside, own = _owned(target[rows], len(weight), part)
            picked = torch.where(inside, z.gather(1, own[:, None])[:, 0], 0.0)
            exp = (z - top[:, None]).exp_()
            weighted = torch.where(exp > 0, exp * z, 0.0).sum(1)  # filling has no share, not even inf * 0
            sums = _reduce(torch.stack([exp.sum(1), weighted, picked]), part)
            log_sum[rows] = top + sums[0].log()
            log_prob[rows] = sums[2] - log_sum[rows]
            entropy[rows] = log_sum[rows] - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, target, temperature, log_sum, entropy)
        ctx.part, ctx.chunk = part, chunk
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_log_prob, d_entropy = grads
        hidden, weight, target, temperature, log_sum, entropy = ctx.saved_tensors
        part: Slice = ctx.part
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(target), weight, ctx.chunk):
            scale = temperature[rows] if temperature is not None else None
            z = _logits(hidden[rows], weight, scale, part)
            log_p = z - log_sum[rows, None]
            p = log_p.exp()
            d_z = torch.where(p > 0, (log_p + entropy[rows, None]) * -d_entropy[rows, None], 0.0).mul_(p)
            d_z.addcmul_(p, d_log_prob[rows, None], value=-1)
            inside, own = _owned(target[rows], len(weight), part)
            d_z.scatter_add_(1, own[:, None], torch.where(inside, d_log_prob[rows], 0.0)[:, None])
            if scale is not None:
                d_z.div_(scale[:, None])
            low = d_z.to(hidden.dtype)
            d_hidden[rows] = low @ weight
            d_weight += low.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def _chunks(count: int, weight: torch.Tensor, chunk: int) -> list[slice]:
    budget = LOGITS.get(weight.device.type, LOGITS["other"])
    return blocks(count, len(weight) * torch.float32.itemsize, budget, chunk)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor | None, part: Slice) -> torch.Tensor:
    """This rank's logits over the temperature, float32; filling is -inf."""
    z = (hidden @ weight.T).float()
    if temperature is not None:
        z.div_(temperature[:, None])
    real = part.vocab - part.first
    if real < len(weight):
        z[:, max(real, 0) :] = float("-inf")
    return z


def _owned(target: torch.Tensor, rows: int, part: Slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets this rank has, and their columns here; 0 for others."""
    own = target - part.first
    inside = (own >= 0) & (own < rows)
    return inside, torch.where(inside, own, 0)


def _reduce(values: torch.Tensor, part: Slice, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if part.ranks > 1:
        dist.all_reduce(values, op=op, group=part.group)
    return values
