"""Hidden states and a loss of log-probs in, the loss out, its gradient taken block by block inside the forward pass.

    block of rows -> logits -> log-prob, entropy -> loss of the block -> d log-prob, d entropy -> d logits, in place
                                                                         -> d hidden, d weight, d bias

Logits are made once, where `logprobs.linear_log_probs` makes them twice. That is exact where a token's loss depends
on its own log-prob and entropy alone, so that the loss of the whole is the sum over blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slime_core.algo.logprobs import Head, HeadGradients, Softmax, inverse_of

Tensor = torch.Tensor
BlockLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""Rows of the block, their log-probs and entropies [n] with gradient, to the scalar sum of their weighted losses."""


class _LinearLoss(torch.autograd.Function):
    """See :func:`linear_loss`. The backward pass only hands over what the forward pass found, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        inverse: Tensor | None,
        chunk: int,
        loss: BlockLoss,
    ) -> Tensor:
        head = Head(weight, bias, target, inverse)
        gradients = HeadGradients(hidden, head, ctx.needs_input_grad)
        parts = head.blocks(len(hidden), chunk) or [slice(0, 0)]  # the loss is asked at least once
        room = head.room(parts[0].stop)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in parts:
            logits = head.logits(hidden[part], room)
            soft = head.softmax(logits, part)
            value, *grads = _slopes(loss, part, soft)
            total += value
            head.gradient_(logits, part, soft, *grads)
            gradients.add(logits, hidden[part], part)
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a loss that was taken within its forward pass can be asked for once")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(grads[0]), None, None, None, None


def _slopes(loss: BlockLoss, part: slice, soft: Softmax) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of a block, and its derivatives by log-probs and entropies (None where it reads none)."""
    with torch.enable_grad():
        log_probs, entropy = soft.log_probs.detach().requires_grad_(), soft.entropy.detach().requires_grad_()
        value = loss(part, log_probs, entropy)
        d_log_probs, d_entropy = torch.autograd.grad(value, (log_probs, entropy), allow_unused=True)
    return value.detach(), d_log_probs, d_entropy


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss: BlockLoss,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk: int = 0,
) -> Tensor:
    """The sum of ``loss`` over blocks of rows, a scalar in float32 (float64 for float64 inputs), with gradient.

    Arguments as in `logprobs.linear_log_probs`. ``loss`` is asked at least once, with no rows where there are none.
    """
    return _LinearLoss.apply(hidden, weight, bias, target, inverse_of(temperature, hidden), chunk, loss)  # type: ignore[no-any-return]
