"""A worker's parameters on their way to engines: gathered one at a time, in the names of the model folder, by a route.

    no route     one float32 rank: its live storage; else whole tensors
    disk         rank 0 writes a folder          `weights.transports.disk`
    another      rank 0 sends as the engine has it sent, SGLang's into a buffer or as a broadcast

Every rank goes through all gathers, also where rank 0 has failed, so that no rank waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import TensorPart, TensorSource
from slime_core.weights.transports.quantised import no_linear_layers

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.adapters import MergedWeights
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.folder_layout import FolderLayout, Parts
    from slime_core.weights.fp8 import BlockFormat


def sources_of(weights: MergedWeights, device: torch.device, parts: Parts) -> list[TensorSource]:
    """Tensors by the model's names, tied ones once, each gathered to the device, and merged, as it is sent.

    Raises:
        TrainerError: a tensor whose form in a model folder is not known here.
    """
    sources = []
    for name, tensor in weights.parameters.items():
        if not tensor.is_floating_point():
            raise TrainerError(f"{name} is {tensor.dtype}, and engines are sent floats only")
        sources.append(TensorSource(parts(name, tensor.shape), partial(_plain, weights, name, device)))
    return sources


def _plain(weights: MergedWeights, name: str, device: torch.device) -> torch.Tensor:
    """A merged weight is rounded once, by what sends it."""
    with torch.no_grad():
        return weights.whole(name, torch.float32 if weights.changes(name) else None).to(device)


@torch.no_grad()
def rounded(
    tensors: Mapping[str, torch.Tensor], block_format: BlockFormat | None, parts: Parts
) -> dict[str, torch.Tensor]:
    """The tensors of an engine in this process, which computes with what one in fp8 would be sent; None: as they are.

    Ranks other than the first have none.

    Raises:
        TrainerError: none of them is known as a linear layer.
    """
    if block_format is None:
        return dict(tensors)
    engine_tensors = {
        name: _rounded(tensor, block_format, parts(name, tensor.shape)) for name, tensor in tensors.items()
    }
    if tensors and all(engine_tensors[name] is tensor for name, tensor in tensors.items()):
        raise no_linear_layers()
    return engine_tensors


def _rounded(tensor: torch.Tensor, block_format: BlockFormat, parts: Iterable[TensorPart]) -> torch.Tensor:
    linear = [part for part in parts if block_format.covers(part.name)]
    if not linear:
        return tensor
    values = tensor.detach().clone()
    for part in linear:
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


def check_names(layout: FolderLayout, sources: Iterable[TensorSource], folder: ModelFolder) -> None:
    """Compare the names of what would be sent with those of the folder that an engine has loaded.

    Raises:
        TrainerError: a name that the folder does not have, which an engine would pass over.
    """
    if folder.init_weights == "random":
        return
    names = layout.ties | folder.tensors().keys()
    sent = (part.name for source in sources for part in source.parts)
    if unknown := [name for name in sent if not names & {*layout.names(name)}]:
        raise TrainerError(
            f"{len(unknown)} tensors are not in the model folder by the names that they would be sent under: "
            + ", ".join(unknown[:3]),
            where=str(folder.path),
            why="an engine keeps what it has of tensors whose names it does not know",
            fix="save the model again with transformers (from_pretrained, then save_pretrained), or use "
            "rollout_engine=local",
        )
