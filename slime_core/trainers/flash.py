"""Attention within spans of packed rows: one varlen flash call of torch's, on a GPU in half precision."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

EIGHTS = 8
"""Flash attention takes heads of a multiple of this many numbers, the same of q, k and v."""


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    most_q: int,
    most_k: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of spans that lie end to end, [T, heads, width of v].

    Args:
        q: [T, heads, d]; k and v have as many heads or fewer, and v may have another width
        cu_q: [spans + 1], first row of each span of q, and the end; ``cu_k`` of k and v, aligned at the spans' ends
        most_q: rows of the longest span; ``most_k`` of k and v
        scale: of the products; d ** -0.5 where it is None
        window: rows that a row sees, itself included; all before it where it is None
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    width, whole = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // EIGHTS) * EIGHTS
    q, k, v = (x if x.shape[-1] == whole else pad(x, (0, whole - x.shape[-1])) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: torch.Tensor = _Flash.apply(q, k, v, cu_q, cu_k, most_q, most_k, scale, -1 if window is None else window - 1)
    return out[..., :width]


class _Flash(torch.autograd.Function):
    """The kernel behind torch's `varlen_attn`, which itself knows grouped heads from torch 2.12 on only."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        one = FlashCall(*args[3:])
        out = one.forward(*args[:3])
        ctx.one = one
        ctx.save_for_backward(*args[:3], out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.one.backward(grads[0], *ctx.saved_tensors), None, None, None, None, None, None)


class FlashCall:
    """One call, forward and then backward; arguments as in :func:`varlen`, ``before`` -1 where there is no window."""

    def __init__(
        self, cu_q: torch.Tensor, cu_k: torch.Tensor, most_q: int, most_k: int, scale: float, before: int
    ) -> None:
        self.spans = cu_q, cu_k
        self.shape = most_q, most_k, 0.0, before < 0  # a window is the kernel's own mask
        self.options = {"scale": scale, "window_size_left": before, "window_size_right": 0}
        self.sums = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, heads, width]; numbers of a head lie side by side, and are a multiple of ``EIGHTS``."""
        out, self.sums, *_ = FLASH.forward(q, k, v, *self.spans, *self.shape, False, **self.options)
        return out  # type: ignore[no-any-return]

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v."""
        state = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # of dropout, which there is none of
        saved = q, k, v, out, self.sums, *self.spans, *self.shape, *state
        return FLASH.backward(grad.contiguous(), *saved, **self.options)  # type: ignore[no-any-return]


class FLASH:
    """Torch's flash attention over spans."""

    forward = torch.ops.aten._flash_attention_forward
    backward = torch.ops.aten._flash_attention_backward


CUDNN = 91500  # versions above it are right for lengths that 128 does not divide, and torch prefers those alone
STEPS, LEAST = 16, 64
"""cuDNN plans a length at its first call, for some 40 ms: lengths are filled up to one of 16 between powers of two,
and to a multiple of 64. That is a sixteenth more rows at most."""


@cache
def has_cudnn(device: torch.device) -> bool:
    """Whether torch's scaled_dot_product_attention goes to cuDNN first: on Hopper and Blackwell, by default."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":  # torch's own switch
        return False
    supported = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return supported and (torch.backends.cudnn.version() or 0) > CUDNN and torch.backends.cuda.cudnn_sdp_enabled()


def filled(length: int) -> int:
    """The rows that a sequence is filled up to: see ``STEPS``."""
    step = max((1 << length.bit_length() - 1) // STEPS, LEAST)
    return -(-length // step) * step
