"""A worker's parameters on their way to engines: gathered one at a time, in the names of the model folder, by a route.

    no route     one float32 rank: its live storage; else whole tensors
    disk         rank 0 writes a folder          `weights.transports.disk`
    another      rank 0 sends as the engine has it sent, SGLang's into a buffer or as a broadcast

Every rank goes through all gathers, also where rank 0 has failed, so that no rank waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import TensorPart, TensorSource
from slime_core.weights.transports.quantised import no_linear_layers

if TYPE_CHECKING:
    from slime_core.weights.fp8 import BlockFormat

CONVOLUTION = "linear_attn.conv1d.weight"  # [channels, 1, width]
STACKED = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""Tensors of a layer's experts, one above the other: [E, 2 I, H] (gate, then up) and [E, H, I]."""


def sources_of(named: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]) -> list[TensorSource]:
    """Tensors by the model's names, tied ones once; ``whole`` makes one whole.

    Raises:
        TrainerError: a tensor whose name in a model folder is not known here.
    """
    sources = []
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise TrainerError(f"{name} is {tensor.dtype}, and engines are sent floats only")
        sources.append(TensorSource(parts_of(name, tensor.shape), partial(_plain, whole, tensor)))
    return sources


def _plain(whole: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole and without its gradients; a DTensor's own ``detach`` takes twenty times as long."""
    with torch.no_grad():
        return whole(tensor).detach()


def parts_of(name: str, shape: torch.Size) -> tuple[TensorPart, ...]:
    """What a parameter is called in a model folder: itself, or each expert's matrices.

    Raises:
        TrainerError: a stack of matrices of another layout.
    """
    if len(shape) < 3 or name.endswith(CONVOLUTION):
        return (TensorPart(name, tuple(shape), _whole),)
    prefix, _, last = name.rpartition(".")
    if not name.endswith(STACKED):
        raise TrainerError(
            f"{name} of shape {list(shape)} has no known form in an engine",
            why=f"of stacked matrices {' and '.join(STACKED)} are known",
            fix="use rollout_engine=local for this model",
        )
    experts, rows, columns = shape
    if last == "down_proj":
        return tuple(
            TensorPart(f"{prefix}.{number}.down_proj.weight", (rows, columns), partial(_rows, number, 0, rows))
            for number in range(experts)
        )
    half = rows // 2
    return tuple(
        TensorPart(
            f"{prefix}.{number}.{which}_proj.weight", (half, columns), partial(_rows, number, begin, begin + half)
        )
        for number in range(experts)
        for which, begin in (("gate", 0), ("up", half))
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rows(number: int, begin: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[number, begin:end]


@torch.no_grad()
def rounded(tensors: Mapping[str, torch.Tensor], block_format: BlockFormat | None) -> dict[str, torch.Tensor]:
    """The tensors of an engine in this process, which computes with what one in fp8 would be sent; None: as they are.

    Ranks other than the first have none.

    Raises:
        TrainerError: none of them is known as a linear layer.
    """
    if block_format is None:
        return dict(tensors)
    block_format = replace(block_format, weights=None)  # names of a folder, which are not the model's in every family
    engine_tensors = {
        name: _rounded(name, tensor, block_format) if tensor.ndim == 2 or name.endswith(STACKED) else tensor
        for name, tensor in tensors.items()
    }
    if tensors and all(engine_tensors[name] is tensor for name, tensor in tensors.items()):
        raise no_linear_layers()
    return engine_tensors


def _rounded(name: str, tensor: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    parts = [part for part in parts_of(name, tensor.shape) if block_format.covers(part.name)]
    if not parts:
        return tensor
    values = tensor.detach().clone()
    for part in parts:
        part.cut(values).copy_(block_format.rounded(part.cut(values)))
    return values


def stored_buffers(hf: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a model folder holds."""
    buffers = {}
    for prefix, module in hf.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers
