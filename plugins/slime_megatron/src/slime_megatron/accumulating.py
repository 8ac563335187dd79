"""What megatron-core takes from Apex for weight gradients, made of torch's own products where neither it nor TE is.

    product of a layer's backward pass --added in float32 within it--> main_grad
    main_grads --one kernel for many--> their norm, and the same scaled

Without it each gradient is rounded to the weights' dtype, written, read and added, and norm and clipping read and
write each tensor by itself; the norm waits for the device at every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from slime_core.algorithms.shared.logprobs import add_product


class WeightGradients:
    """Stands where Apex's extension `fused_weight_gradient_mlp_cuda` would: total += grads^T rows.

    rows [T, in], grads [T, out], total [out, in]; sums are in the dtype of ``total``.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        """Into float32 gradients."""
        add_product(total, grads.t(), rows, fresh=False)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # main gradients in half precision


def norm(chunk: int, overflow: torch.Tensor, lists: Sequence[Any], *_: Any) -> tuple[torch.Tensor, None]:
    """The Euclidean norm of all tensors of the first list together, [1]; no value comes to the host for it."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None


def scale(chunk: int, overflow: torch.Tensor, lists: Sequence[Any], factor: float) -> None:
    """The tensors of the first list times a factor, into those of the second: here always the same ones."""
    new, into = lists
    if any(a is not b for a, b in zip(new, into, strict=True)):
        torch._foreach_copy_(into, new)
    if into:  # a rank may have none
        torch._foreach_mul_(into, factor)


def provide() -> None:
    """Let megatron-core find them where it has nothing better; calling again changes nothing."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        layers._grad_accum_fusion_available = True
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
