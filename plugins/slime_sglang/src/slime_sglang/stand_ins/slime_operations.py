"""Declares operations that have no build for a bare CPU before a module looks for them; they are never called.

A torchvision that was built for CUDA loads beside a torch without it, and so do models of `sgl_kernel`'s operations.
SGLang's plain torch adapters compute on a CPU, but hold some tensors in pinned memory, which only a GPU's driver has:
there it is ordinary memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATIONS = {  # module that looks for operations when it is imported -> their names and arguments
    "torchvision._meta_registrations": {"torchvision::nms": BOXES, "torchvision::qnms": BOXES},
    "sglang.srt.models.qwen3_5": {
        f"sgl_kernel::{name}_cpu": "() -> ()"
        for name in (
            *("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate"),
            "fused_qkvzba_split_reshape_cat_contiguous",
        )
    },
}
ADAPTERS = "sglang.srt.lora.backend.torch_backend"
"""Imported before any tensor of an adapter is made, and only where adapters are served."""


class OperationFinder(MetaPathFinder):
    """Declares what a module looks for when it is imported; it finds no module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if fullname == ADAPTERS:
            unpin()
        if fullname in OPERATIONS:
            import torch

            for name, arguments in OPERATIONS[fullname].items():
                package, _, operation = name.partition("::")
                if not (torch.version.cuda or torch.version.hip or hasattr(getattr(torch.ops, package), operation)):
                    torch.library.define(name, arguments)


def unpin() -> None:
    """Have torch take ordinary memory where pinned memory is requested and no device could pin it."""
    import torch

    if torch.cuda.is_available():
        return
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment, misc]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def without(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return make(*arguments, **named)

    return without


sys.meta_path.insert(0, OperationFinder())
