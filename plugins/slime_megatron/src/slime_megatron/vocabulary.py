"""Log-probs and entropies from hidden states, the vocabulary split over tensor-parallel ranks, logits never whole.

    hidden [R, h] --blocks of rows--> logits of this rank's ids --softmax of them--> with all ranks': log-prob, entropy

With x the logits, i the inverse temperature, m_r their maximum on rank r, s_r = sum exp((x - m_r) i) and t_r = sum
exp((x - m_r) i) (x - m_r) i there: s = sum exp(d_r) s_r and t = sum exp(d_r) (t_r + d_r s_r), where d_r = (m_r - m) i.
Log-prob = (x[target] - m) i - log s, entropy = log s - t / s. Logits are made again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime_core.algorithms.shared.logprobs import Head, Softmax, add_product, inverse_of, linear_log_probs


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

    def real(self, rows: int) -> int:
        """How many of this rank's rows are ids."""
        return min(max(self.vocab - self.first, 0), rows)


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
        real = part.real(len(weight))
        weight = weight if real == len(weight) else weight[:real]
        return linear_log_probs(hidden, weight, target, temperature=temperature, chunk=chunk)
    inverse = inverse_of(temperature, hidden)
    results: tuple[torch.Tensor, torch.Tensor] = _LogProbs.apply(hidden, weight, target, inverse, part, chunk)
    return results


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        inverse: torch.Tensor | None,
        part: Slice,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inside, local = _owned(target, len(weight), part)
        head = Head(weight[: part.real(len(weight))], None, local, inverse)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        soft = Softmax(*(hidden.new_empty(len(target), dtype=dtype) for _ in range(4)))
        parts = Head(weight, None, local, inverse).blocks(len(target), chunk)  # the same on all ranks
        room = head.room(parts[0].stop if parts else 0)
        for rows in parts:
            local_softmax = _nothing(soft, rows)
            if len(head.weight):
                local_softmax = head.softmax(head.logits(hidden[rows], room), rows)
            scale = inverse[rows] if inverse is not None else torch.ones_like(local_softmax.peak)
            for column, joined in zip(soft, _joined(local_softmax, inside[rows], scale, part), strict=True):
                column[rows] = joined
        ctx.save_for_backward(hidden, weight, inside, local, inverse, *soft)
        ctx.part, ctx.parts = part, parts
        return soft.log_probs, soft.entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inside, local, inverse, *rest = ctx.saved_tensors
        head = Head(weight[: ctx.part.real(len(weight))], None, local, inverse)
        d_weight = torch.zeros_like(weight, dtype=rest[0].dtype)
        d_hidden = torch.empty_like(hidden) if len(head.weight) else torch.zeros_like(hidden)
        room = head.room(ctx.parts[0].stop if ctx.parts else 0)
        for rows in ctx.parts if len(head.weight) else ():
            logits, soft = head.logits(hidden[rows], room), Softmax(*(values[rows] for values in rest))
            first, row_grads = logits[:, 0].to(soft.peak.dtype, copy=True), [grad[rows] for grad in grads]
            head.gradient_(logits, rows, soft, *row_grads)
            scale = inverse[rows] if inverse is not None else torch.ones_like(soft.peak)
            log_p = (first - soft.peak) * scale - soft.total.log()
            other = -scale * log_p.exp() * (row_grads[0] + row_grads[1] * (log_p + soft.entropy))
            logits[:, 0] = torch.where(
                inside[rows], logits[:, 0], other.to(logits.dtype)
            )  # no target of theirs is here
            torch.mm(logits, head.weight, out=d_hidden[rows])
            add_product(d_weight[: len(head.weight)], logits.T, hidden[rows], fresh=False)
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def _nothing(like: Softmax, rows: slice) -> Softmax:
    """Of a rank that has filling alone."""
    zeros = torch.zeros_like(like.total[rows])
    return Softmax(zeros, zeros, torch.full_like(zeros, float("-inf")), zeros)


def _joined(partial: Softmax, inside: torch.Tensor, scale: torch.Tensor, part: Slice) -> Softmax:
    """The softmax over all ranks' logits, of each rank's own; ``inside`` says which targets are this rank's."""
    peak = _reduce(partial.peak.clone(), part, dist.ReduceOp.MAX)
    shift = torch.where(partial.total > 0, (partial.peak - peak) * scale, 0.0)
    log_total = torch.where(partial.total > 0, partial.total.log(), 0.0)
    total = shift.exp() * partial.total
    weighted = total * (log_total - partial.entropy + shift)
    picked = torch.where(inside, partial.log_probs + log_total + shift, 0.0)
    total, weighted, picked = _reduce(torch.stack([total, weighted, picked]), part)
    return Softmax(picked - total.log(), total.log() - weighted / total, peak, total)


def _owned(target: torch.Tensor, rows: int, part: Slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets this rank has, and their columns here; 0 for others."""
    local = target - part.first
    inside = (local >= 0) & (local < rows)
    return inside, torch.where(inside, local, 0)


def _reduce(values: torch.Tensor, part: Slice, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(values, op=op, group=part.group)
    return values
