# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`logprobs.softmax` and `logprobs.gradient_` as Triton kernels: logits are read once, no float32 copy of them exists.

Imported on a GPU alone, where triton comes with torch. One row of logits is read by one program, with a running
maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
COLUMNS = 4096
WARPS = 8


@triton.jit
def _statistics(logits, target, inverse, log_probs, entropy, peak, total, vocab, stride, BLOCK: tl.constexpr):
    """Of one row x: m = max x, s = sum exp(z) and t = sum exp(z) z with z = (x - m) inverse."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    columns = tl.arange(0, BLOCK)
    m = tl.full((), -float("inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    t = tl.zeros((), tl.float32)
    for begin in range(0, vocab, BLOCK):
        inside = begin + columns < vocab
        x = tl.load(logits + row * stride + begin + columns, mask=inside, other=-float("inf")).to(tl.float32)
        high = tl.maximum(m, tl.max(x, 0))
        moved = tl.where(m == -float("inf"), 0.0, (m - high) * scale)
        z = (x - high) * scale
        e = tl.exp(z)
        t = tl.exp(moved) * (t + moved * s) + tl.sum(tl.where(inside, e * z, 0.0), 0)
        s = tl.exp(moved) * s + tl.sum(tl.where(inside, e, 0.0), 0)
        m = high
    chosen = tl.load(logits + row * stride + tl.load(target + row)).to(tl.float32)
    log_total = tl.log(s)
    tl.store(log_probs + row, (chosen - m) * scale - log_total)
    tl.store(entropy + row, log_total - t / s)
    tl.store(peak + row, m)
    tl.store(total + row, s)


@triton.jit
def _gradient(
    logits, target, inverse, peak, total, entropy, d_log_prob, d_entropy, vocab, stride, BLOCK: tl.constexpr
):
    """x becomes inverse * (d_log_prob (1[y] - p) - d_entropy p (log p + H))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    scale = tl.load(inverse + row)
    direct = tl.load(d_log_prob + row)
    place = logits + row * stride + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    log_p = (x - tl.load(peak + row)) * scale - tl.log(tl.load(total + row))
    slope = direct + tl.load(d_entropy + row) * (log_p + tl.load(entropy + row))
    grad = tl.where(columns == tl.load(target + row), direct, 0.0) - tl.exp(log_p) * slope
    tl.store(place, (grad * scale).to(logits.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, target: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy, highest logit and sum of exponentials: see `logprobs.softmax`, [n] float32.

    Args:
        logits: [n, vocab] in bfloat16, float16 or float32, rows contiguous
        target: [n] int64
        inverse: [n], 1 / temperature; None is 1
    """
    rows, vocab = logits.shape
    columns = logits.new_empty(4, rows, dtype=torch.float32)
    if rows:
        scale = _whole(inverse, columns[0], 1.0)
        _statistics[(rows,)](logits, target, scale, *columns, vocab, logits.stride(0), BLOCK=COLUMNS, num_warps=WARPS)
    return columns[0], columns[1], columns[2], columns[3]


def gradient_(
    logits: Tensor,
    target: Tensor,
    inverse: Tensor | None,
    soft: tuple[Tensor, Tensor, Tensor, Tensor],
    d_log_probs: Tensor | None,
    d_entropy: Tensor | None,
) -> None:
    """Put the gradient of the logits into their place; ``soft`` is what :func:`statistics` found."""
    rows, vocab = logits.shape
    if not rows:
        return
    _, entropy, peak, total = (one.contiguous() for one in soft)
    grid = (rows, triton.cdiv(vocab, COLUMNS))
    scale, *grads = (_whole(one, total, fill) for one, fill in ((inverse, 1.0), (d_log_probs, 0.0), (d_entropy, 0.0)))
    _gradient[grid](
        logits, target, scale, peak, total, entropy, *grads, vocab, logits.stride(0), BLOCK=COLUMNS, num_warps=WARPS
    )


def _whole(values: Tensor | None, like: Tensor, fill: float) -> Tensor:
    return torch.full_like(like, fill) if values is None else values.to(like.dtype).contiguous()
