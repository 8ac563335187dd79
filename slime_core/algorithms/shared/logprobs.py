"""Log-prob and entropy of target tokens from hidden states, a block of rows at a time.

With a loss of them in, the loss out: its gradient is taken block by block inside the forward pass, so logits are made
once and not twice. That is exact where a token's loss depends on its own log-prob and entropy alone.

    hidden [R, hidden] --block--> logits in compute dtype --part--> float32: log-prob, entropy, or their gradient

Blocks are chosen by bytes. Logits of one block are alive at once, in the dtype of the product; of a part of it there
are one or two float32 arrays. The gradient takes the place of the logits, and is added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from slime_core.memory import gpu_memory

LOGITS = {"cpu": 64 << 20, "other": 512 << 20}  # bytes of logits alive at once; of a larger GPU's memory a 64th
EXACT = {"cpu": 1 << 20, "other": 128 << 20}  # bytes of one float32 array made of them
Tensor = torch.Tensor
BlockLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""Rows of a block, their log-probs and entropies [n] with gradient, to the scalar sum of their weighted losses."""


class Softmax(NamedTuple):
    """Of a block of rows, all [n] in float32 (float64 for float64 logits)."""

    log_probs: Tensor  # of the targets
    entropy: Tensor
    peak: Tensor  # the highest logit, before the temperature
    total: Tensor  # sum of exp((logit - peak) / temperature)


class HeadKernels(NamedTuple):
    """Other arithmetic of the forward pass, of an engine whose bits are wanted; gradients stay as they are."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # hidden [n, hidden], weight, bias: logits [n, vocab]
    log_probs: Callable[[Tensor, slice], Tensor]  # logits of these rows: log-probs of their targets [n]


@dataclass(slots=True)
class Head:
    """What turns hidden states into logits, and the tokens asked for."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    target: Tensor  # [R] int64
    inverse: Tensor | None  # [R], 1 / temperature
    kernels: HeadKernels | None = None

    def blocks(self, rows: int, chunk: int = 0) -> list[slice]:
        """Rows whose logits are alive at once, at most ``chunk`` of them (0: as many as the bytes allow)."""
        row = len(self.weight) * self.weight.element_size()
        device, budget = self.weight.device, LOGITS.get(self.weight.device.type, LOGITS["other"])
        if device.type == "cuda":  # each block adds to a float32 gradient of the whole matrix
            budget = max(budget, gpu_memory(device) // 64)
        return blocks(rows, row, budget, chunk)

    def room(self, largest: int) -> Tensor:
        """Memory for the logits of a block."""
        return self.weight.new_empty(0 if self.kernels else largest, len(self.weight))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[n, vocab] in the dtype of the product, in the first rows of ``out`` where it has some."""
        if self.kernels is not None:
            return self.kernels.product(hidden, self.weight, self.bias)
        out = out[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=out)
        return torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def softmax(self, logits: Tensor, part: slice) -> Softmax:
        """Statistics of the rows ``part``, whose logits these are."""
        soft = softmax(logits, self.target[part], self.inverse[part] if self.inverse is not None else None)
        return soft if self.kernels is None else soft._replace(log_probs=self.kernels.log_probs(logits, part))

    def gradient_(self, logits: Tensor, part: slice, soft: Softmax, *grads: Tensor | None) -> None:
        """Put the gradient of the logits into their place; ``grads`` are of log-probs and entropies."""
        inverse = self.inverse[part] if self.inverse is not None else None
        gradient_(logits, self.target[part], inverse, soft, *grads)


class HeadGradients:
    """Gradients of hidden states, output matrix and bias, added up block by block in float32."""

    def __init__(self, hidden: Tensor, head: Head, needs: tuple[bool, ...]) -> None:
        sums = torch.promote_types(hidden.dtype, torch.float32)
        self.head = head
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.empty_like(head.weight, dtype=sums) if needs[1] else None
        self.bias = torch.zeros_like(head.bias, dtype=sums) if head.bias is not None and needs[2] else None
        self._started = False

    def add(self, d_logits: Tensor, hidden: Tensor, part: slice) -> None:
        """One block's."""
        if self.hidden is not None:
            torch.mm(d_logits, self.head.weight, out=self.hidden[part])
        if self.weight is not None:
            add_product(self.weight, d_logits.T, hidden, fresh=not self._started)
            self._started = True
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)

    def finish(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients in the dtypes of what they are of, times ``scale``; they are given away."""
        if self.weight is not None and not self._started:
            self.weight.zero_()
        hidden, weight, bias = self.hidden, self.weight, self.bias
        self.hidden = self.weight = self.bias = None
        dtype = self.head.weight.dtype
        return _scaled(hidden, dtype, scale), _scaled(weight, dtype, scale), _scaled(bias, dtype, scale)


def _scaled(tensor: Tensor | None, dtype: torch.dtype, scale: Tensor | None) -> Tensor | None:
    if tensor is None or (scale is None and tensor.dtype == dtype):
        return tensor
    if scale is None:
        return tensor.to(dtype)
    return torch.mul(tensor, scale, out=tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
    """total += left @ right, or total = left @ right where ``fresh``, summed in the dtype of ``total``."""
    beta = 0 if fresh else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=beta, out=total)
    elif fresh:
        total.copy_(left @ right)
    else:
        total += left @ right


def blocks(rows: int, row: int, budget: int, chunk: int = 0) -> list[slice]:
    """``rows`` of ``row`` bytes cut into even runs that ``budget`` bytes hold, of at most ``chunk`` where not 0."""
    most = max(budget // row, 1)
    count = -(-rows // min(most, chunk or most))
    size = -(-rows // count) if count else 1
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _parts(logits: Tensor, dtype: torch.dtype) -> list[slice]:
    return blocks(len(logits), logits.shape[1] * dtype.itemsize, EXACT.get(logits.device.type, EXACT["other"]))


def _by_kernel(logits: Tensor) -> bool:
    """Whether `softmax_cuda` does the work: on a GPU with triton, in 32 bits or fewer."""
    return logits.is_cuda and logits.dtype != torch.float64 and logits.stride(1) == 1 and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def softmax(logits: Tensor, target: Tensor, inverse: Tensor | None) -> Softmax:
    """Log-prob of each target and entropy of its row of ``logits`` [n, vocab] * ``inverse`` [n]; nothing is changed.

    With z the shifted logits and s = sum exp(z): log p(y) = z_y - log s, H = log s - sum(exp(z) z) / s.
    """
    if _by_kernel(logits):
        from slime_core.algorithms.shared.softmax_cuda import statistics

        return Softmax(*statistics(logits, target, inverse))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    soft = Softmax(*(logits.new_empty(len(logits), dtype=dtype) for _ in range(4)))
    for part in _parts(logits, dtype):
        rows = logits[part]
        peak = rows.amax(1).to(dtype)
        shifted = rows - peak[:, None]
        if inverse is not None:
            shifted *= inverse[part, None]
        exps = shifted.exp()
        total = exps.sum(1)
        chosen = shifted.gather(1, target[part, None])[:, 0]
        mean = shifted.mul_(exps).sum(1).div_(total)
        log_total = total.log()
        for column, values in zip(soft, (chosen - log_total, log_total - mean, peak, total)):
            column[part] = values
    return soft


def gradient_(
    logits: Tensor, target: Tensor, inverse: Tensor | None, soft: Softmax, d_log_probs: Tensor | None = None,
    d_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Logits [n, vocab] in, their gradient in the same place: d log p(y) = 1[y] - p, d H = -p (log p + H)."""
    if _by_kernel(logits):
        from slime_core.algorithms.shared.softmax_cuda import gradient_ as by_kernel

        by_kernel(logits, target, inverse, soft, d_log_probs, d_entropy)
        return
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scale = inverse if inverse is not None else torch.ones_like(soft.total)
    direct = (d_log_probs if d_log_probs is not None else torch.zeros_like(scale)) * scale
    for part in _parts(logits, dtype):
        rows, at = logits[part], target[part, None]
        shifted = rows - soft.peak[part, None]
        if inverse is not None:
            shifted *= inverse[part, None]
        factor = -direct[part, None] / soft.total[part, None]
        if d_entropy is None:
            exps = shifted.exp_()
        else:
            exps = shifted.exp()
            slope = d_entropy[part, None] * scale[part, None] / soft.total[part, None]
            offset = soft.entropy[part, None] - soft.total[part, None].log()
            factor = shifted.add_(offset).mul_(-slope).add_(factor)
        chosen = exps.gather(1, at) * (factor if d_entropy is None else factor.gather(1, at)) + direct[part, None]
        torch.mul(exps, factor, out=rows)
        rows.scatter_(1, at, chosen.to(rows.dtype))


class _LinearLogProbs(torch.autograd.Function):
    """log softmax((h W^T + b) / temperature) at the target, and the entropy of that softmax.

    Logits are made again in the backward pass: none is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        inverse: Tensor | None,
        chunk: int,
        kernels: HeadKernels | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, target, inverse, kernels)
        parts = head.blocks(len(hidden), chunk)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        soft = Softmax(*(hidden.new_empty(len(hidden), dtype=dtype) for _ in range(4)))
        room = head.room(parts[0].stop if parts else 0)
        for part in parts:
            for column, values in zip(soft, head.softmax(head.logits(hidden[part], room), part)):
                column[part] = values
        ctx.save_for_backward(hidden, weight, bias, target, inverse, *soft)
        ctx.parts, ctx.kernels = parts, kernels
        ctx.set_materialize_grads(False)
        return soft.log_probs, soft.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, inverse, *rest = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None, None, None, None
        head, soft = Head(weight, bias, target, inverse, ctx.kernels), Softmax(*rest)
        gradients = HeadGradients(hidden, head, ctx.needs_input_grad)
        room = head.room(ctx.parts[0].stop if ctx.parts else 0)
        for part in ctx.parts:
            logits = head.logits(hidden[part], room)
            block = [grad[part] if grad is not None else None for grad in grads]
            head.gradient_(logits, part, Softmax(*(values[part] for values in soft)), *block)
            gradients.add(logits, hidden[part], part)
            del logits
        del room  # before the sums are copied to the weights' dtype
        return *gradients.finish(), None, None, None, None


def inverse_of(temperature: Tensor | None, like: Tensor) -> Tensor | None:
    """1 / temperature, [R] in the dtype that log-probs have."""
    return None if temperature is None else temperature.to(torch.promote_types(like.dtype, torch.float32)).reciprocal()


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk: int = 0,
    kernels: HeadKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both [R] in float32 (float64 for float64 inputs).

    Args:
        hidden: [R, hidden], rows that predict the targets; bfloat16 products are turned to float32 part by part
        weight: [vocab, hidden]
        target: [R] int64
        bias: [vocab]
        temperature: [R], logits are divided by it; None is 1
        chunk: rows whose logits are alive at once, at most; 0 is as many as ``LOGITS`` bytes hold
        kernels: what logits and log-probs are computed with, where not with torch
    """
    inverse = inverse_of(temperature, hidden)
    return _LinearLogProbs.apply(hidden, weight, bias, target, inverse, chunk, kernels)  # type: ignore[no-any-return]


class _LogitsLogProbs(torch.autograd.Function):
    """As :class:`_LinearLogProbs`, from the logits themselves, which the model may still need as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor]:
        soft = softmax(logits, target, inverse)
        ctx.save_for_backward(logits, target, inverse, *soft)
        ctx.set_materialize_grads(False)
        return soft.log_probs.clone(), soft.entropy.clone()  # no views: FSDP's hooks want none

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, inverse, *soft = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None
        d_logits = logits.clone(memory_format=torch.contiguous_format)
        gradient_(d_logits, target, inverse, Softmax(*soft), *grads)
        return d_logits, None, None


def logits_log_probs(logits: Tensor, target: Tensor, *, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`linear_log_probs`, from logits [R, vocab] that a model made itself (soft caps, scales)."""
    return _LogitsLogProbs.apply(logits, target, inverse_of(temperature, logits))  # type: ignore[no-any-return]


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
        kernels: HeadKernels | None,
    ) -> Tensor:
        head = Head(weight, bias, target, inverse, kernels)
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
            raise RuntimeError("the gradient of a loss that was taken within its forward pass can be taken only once")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(grads[0]), None, None, None, None, None


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
    kernels: HeadKernels | None = None,
) -> Tensor:
    """The sum of ``loss`` over blocks of rows, a scalar in float32 (float64 for float64 inputs), with gradient.

    Arguments as in :func:`linear_log_probs`. ``loss`` is asked at least once, with no rows where there are none.
    """
    inverse = inverse_of(temperature, hidden)
    return _LinearLoss.apply(hidden, weight, bias, target, inverse, chunk, loss, kernels)  # type: ignore[no-any-return]
