"""A worker's parameters on their way to engines: gathered one at a time, in the names of the model folder, by a route.

    no route     one float32 rank: its live storage; else whole tensors
    disk         rank 0 writes a folder          `weights.transports.disk`
    another      rank 0 sends as the engine has it sent, SGLang's into a buffer or as a broadcast

Every rank goes through all gathers, also where rank 0 has failed, so that no rank waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import TensorPart, TensorSource, one_part
from slime_core.weights.transports.quantised import no_linear_layers

if TYPE_CHECKING:
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.fp8 import BlockFormat

Parts = Callable[[str, torch.Size], tuple[TensorPart, ...]]
"""What a tensor of this name and shape is in a model folder."""
SPLIT = {("SplitModulelist(dim=0)",): 1, ("Chunk(dim=1)", "SplitModulelist(dim=0)"): 2}
"""Matrices of each expert in a stack [E, rows, columns], by the operations that take it apart."""


class FolderLayout:
    """Names and places of a model's tensors in its folder: transformers' conversion of the family, reversed.

    Example:
        parts = FolderLayout(hf).parts("model.layers.0.mlp.experts.down_proj", torch.Size([8, 64, 32]))
    """

    def __init__(self, hf: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming

        family = get_model_conversion_mapping(hf, add_legacy=False)
        loaded = getattr(hf, "_weight_conversions", None) or ()  # a folder may have a prefix or not
        conversions: list[Any] = [one for one in loaded if isinstance(one, PrefixChange)]
        conversions += [one for one in family if not isinstance(one, PrefixChange)]
        reverse: list[Any] = [one.reverse_transform() for one in reversed(conversions)]
        self._renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
        self._converters = [one for one in reverse if not isinstance(one, WeightRenaming)]
        self._prefix = f"{hf.base_model_prefix}."
        ties = getattr(hf, "all_tied_weights_keys", None) or {}
        self._ties = {*ties, *ties.values()}

    def parts(self, name: str, shape: torch.Size) -> tuple[TensorPart, ...]:
        """What a parameter is in a model folder: one tensor, or the matrices of each expert.

        Raises:
            TrainerError: tensors of another layout.
        """
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        converter = next((one for one in self._converters if pattern in one.source_patterns), None)
        if converter is None:
            return one_part(renamed, shape)
        matrices, operations = converter.target_patterns, tuple(map(str, converter.operations))
        if SPLIT.get(operations) != len(matrices):
            raise TrainerError(
                f"{name} of shape {list(shape)} has no known form in an engine",
                why=f"in a model folder it is {', '.join(matrices)}; stacks of experts alone are taken apart",
                fix="use rollout_engine=local for this model",
            )
        experts, rows, columns = shape[0], shape[1] // len(matrices), shape[2]
        return tuple(
            TensorPart(
                renamed.replace(matrices[0], matrix).replace("*", str(expert)),
                (rows, columns),
                partial(_rows, expert, number * rows, (number + 1) * rows),
            )
            for expert in range(experts)
            for number, matrix in enumerate(matrices)
        )

    def check(self, sources: Iterable[TensorSource], folder: ModelFolder) -> None:
        """Compare the names of what would be sent with those of the folder that an engine has loaded.

        Raises:
            TrainerError: a name that the folder does not have, which an engine would pass over.
        """
        if folder.init_weights == "random":
            return
        names = self._ties | folder.tensors().keys()
        sent = (part.name for source in sources for part in source.parts)
        if unknown := [name for name in sent if not {name, name.removeprefix(self._prefix)} & names]:
            raise TrainerError(
                f"{len(unknown)} tensors are not in the model folder by the names that they would be sent under: "
                + ", ".join(unknown[:3]),
                where=str(folder.path),
                why="an engine keeps what it has of tensors whose names it does not know",
                fix="save the model again with transformers (from_pretrained, then save_pretrained), or use "
                "rollout_engine=local",
            )


def sources_of(
    named: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor], parts: Parts
) -> list[TensorSource]:
    """Tensors by the model's names, tied ones once; ``whole`` makes one whole.

    Raises:
        TrainerError: a tensor whose form in a model folder is not known here.
    """
    sources = []
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise TrainerError(f"{name} is {tensor.dtype}, and engines are sent floats only")
        sources.append(TensorSource(parts(name, tensor.shape), partial(_plain, whole, tensor)))
    return sources


def _plain(whole: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole and without its gradients; a DTensor's own ``detach`` takes twenty times as long."""
    with torch.no_grad():
        return whole(tensor).detach()


def _rows(number: int, begin: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[number, begin:end]


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
