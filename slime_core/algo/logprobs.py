"""Hidden states and the output matrix in, log-prob and entropy of each target token out, a block of rows at a time.

Logits never exist for more than ``chunk`` rows at once: the backward pass makes them again, block by block. Only
where a row of log-softmax is no larger than a few hidden states are the blocks kept, because making them again would
cost more than it saves.
"""

from __future__ import annotations

from typing import Any

import torch

KEEP_RATIO = 4  # blocks are kept where the vocabulary is at most this many times the hidden size


class _LinearLogProbs(torch.autograd.Function):
    """log softmax((h W^T + b) / temperature) at the target, and the entropy of that softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        temperature: torch.Tensor | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dtype = len(hidden), torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(rows, dtype=dtype, device=hidden.device)
        entropy = torch.empty(rows, dtype=dtype, device=hidden.device)
        keep = any(ctx.needs_input_grad) and weight.shape[0] <= KEEP_RATIO * weight.shape[1]
        kept = []
        for part in _blocks(rows, chunk):
            block = _log_softmax(hidden[part], weight, bias, temperature, part, dtype)
            log_probs[part] = block.gather(1, target[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(block.exp(), block)
            if keep:
                kept.append(block)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, entropy, *kept)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, temperature, entropy, *kept = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None, None, None
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        d_bias = torch.zeros_like(bias) if bias is not None else None
        for number, part in enumerate(_blocks(len(hidden), ctx.chunk)):
            if kept:
                block = kept[number]
            else:
                block = _log_softmax(hidden[part], weight, bias, temperature, part, entropy.dtype)
            d_logits = _d_logits(
                block, target[part], entropy[part], [g[part] if g is not None else None for g in grads]
            )
            if temperature is not None:
                d_logits /= temperature[part, None]
            d_logits = d_logits.to(hidden.dtype)
            torch.mm(d_logits, weight, out=d_hidden[part])
            d_weight.addmm_(d_logits.T, hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None


def _blocks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _log_softmax(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    part: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    if temperature is not None:
        logits /= temperature[part, None]
    return torch.log_softmax(logits, dim=1)


def _d_logits(
    log_softmax: torch.Tensor, target: torch.Tensor, entropy: torch.Tensor, grads: list[torch.Tensor | None]
) -> torch.Tensor:
    """d log p(y) = 1[y] - p, d H = -p (log p + H)."""
    d_log_prob, d_entropy = grads
    probs = log_softmax.exp()
    if d_entropy is None:
        assert d_log_prob is not None
        out = probs.mul_(-d_log_prob[:, None])
    else:
        inner = (log_softmax + entropy[:, None]) * -d_entropy[:, None]
        out = probs * (inner - d_log_prob[:, None] if d_log_prob is not None else inner)
    if d_log_prob is not None:
        out.scatter_add_(1, target[:, None], d_log_prob[:, None])
    return out


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, both [R] in float32 (float64 for float64 inputs).

    Args:
        hidden: [R, hidden], rows that predict the targets; bfloat16 products are turned to float32 block by block
        weight: [vocab, hidden]
        target: [R] int64
        bias: [vocab]
        temperature: [R], logits are divided by it; None is 1
        chunk: rows whose logits are alive at once
    """
    return _LinearLogProbs.apply(hidden, weight, bias, target, temperature, chunk)  # type: ignore[no-any-return]


def logits_log_probs(
    logits: torch.Tensor, target: torch.Tensor, *, temperature: torch.Tensor | None = None, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`linear_log_probs`, from logits [R, vocab] that a model made itself (soft caps, scales)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = []
    for part in _blocks(len(logits), chunk):
        block = logits[part].to(dtype)
        block = torch.log_softmax(block if temperature is None else block / temperature[part, None], dim=1)
        chosen = block.gather(1, target[part, None])[:, 0]
        found.append((chosen, -torch.linalg.vecdot(block.exp(), block)))
    if not found:
        empty = logits.new_zeros(0, dtype=dtype)
        return empty, empty
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])
