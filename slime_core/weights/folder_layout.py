"""A model's tensors in its folder: another name, or each expert's matrices where the model has them in a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import TensorPart, one_part

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
        self.prefix = f"{hf.base_model_prefix}."
        ties = getattr(hf, "all_tied_weights_keys", None) or {}
        self.ties = {*ties, *ties.values()}

    def names(self, name: str) -> tuple[str, str]:
        """Under which a folder may have a tensor: with the base model's prefix or without."""
        return name, name.removeprefix(self.prefix)

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

    def joined(self, state: Mapping[str, torch.Tensor], folder: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by a folder's names under the names of ``state``: experts copied into stacks, others as they are.

        Raises:
            TrainerError: as `parts`.
        """
        tensors = dict(folder)
        for name in state.keys() - folder.keys():
            parts = self.parts(name, state[name].shape)
            if all(part.name in folder and folder[part.name].shape == part.shape for part in parts):
                pieces = [tensors.pop(part.name) for part in parts]
                tensors[name] = whole = pieces[0].new_empty(state[name].shape)
                for part, piece in zip(parts, pieces, strict=True):
                    part.cut(whole).copy_(piece)
        return tensors


def _rows(number: int, begin: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[number, begin:end]
