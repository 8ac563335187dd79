"""The frozen base of adapters in 4 or 8 bits (QLoRA): linear layers and experts, one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from slime_core.errors import ConfigError
from slime_core.kernels.quantised import FORMS, QuantisedWeight
from slime_core.lora.layers import are_experts
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.loading import Put
from slime_core.weights.nf4 import Nf4Weight
from slime_core.weights.shards import Shards

FEW_ROWS = 64
"""Fewer than these are gates and the like, which weigh little and decide much."""


class FewBits:
    """The weights of a model that a base in ``form`` holds in 4 or 8 bits.

    Embedding, output head, norms, layers of a few rows, and rows that are not whole blocks, stay floats. Of a folder
    in nf4, so do the weights that it has as floats.

    Args:
        model: of transformers, which may be on the meta device
        shards: that it was built from: weights that they have in the same form keep their numbers
        outside: modules that stay as they are, such as a vision tower
    """

    def __init__(self, model: Any, form: str, shards: Shards | None = None, outside: Sequence[nn.Module] = ()) -> None:
        left_out = {id(module) for one in outside for module in one.modules()} | {id(model.get_output_embeddings())}
        self.form = form
        self._layout = FolderLayout(model)
        self._infos = dict(shards.infos) if shards is not None else {}
        self._shards = shards
        self._stored_alone = form == "nf4" and any(isinstance(one.stored, Nf4Weight) for one in self._infos.values())
        self._numbers = lru_cache(maxsize=2)(self._stored)  # experts of a layer are asked for one after another
        self.weights = {
            f"{name}.{key}": (module, key)
            for name, module in model.named_modules()
            if id(module) not in left_out
            for key in _weights(module)
            if self._fits(getattr(module, key))
        }
        """By full name the module of each, and its name there."""

    def _fits(self, weight: torch.Tensor) -> bool:
        return not weight.shape[-1] % FORMS[self.form].block and weight.shape[-2] >= FEW_ROWS

    def of(self, name: str, weight: torch.Tensor, device: torch.device, first: int = 0) -> QuantisedWeight | None:
        """The weight of a name on the device; None where it stays floats. It computes in the dtype of ``weight``.

        Args:
            weight: whole, or of an expert, whose row 0 is row ``first`` of the stack's rows
        """
        module, key = self.weights[name]
        numbers = self._numbers(name, getattr(module, key).shape)
        if numbers is not None:
            if numbers[0].ndim > weight.ndim:
                numbers = (numbers[0].flatten(0, 1), numbers[1].flatten(0, 1))
                numbers = (numbers[0][first : first + len(weight)], numbers[1][first : first + len(weight)])
            make = QuantisedWeight.of_packed if self.form == "nf4" else QuantisedWeight.of_blocks
            return make(*numbers, weight.dtype).to(device)  # type: ignore[return-value]
        return None if self._stored_alone else QuantisedWeight.of(weight.to(device), self.form, weight.dtype)

    def _stored(self, name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers and scales that the folder has of a weight; of experts' matrices in nf4 those of their stack."""
        if self._shards is None:
            return None
        if self.form == "fp8":
            stored = self._infos[name].stored if name in self._infos else None
            same = (
                stored is not None
                and isinstance(stored.form, BlockFormat)
                and stored.form.block == BlockFormat().block
            )
            return self._shards.stored(name) if same else None
        parts = self._layout.parts(name, shape) if self._stored_alone else ()
        full: tuple[torch.Tensor, ...] = ()
        for part in parts:
            names = self._layout.names(part.name)
            numbers = next((self._shards.stored(one) for one in names if one in self._infos), None)
            if numbers is None:
                return None
            if part.shape == shape:
                return numbers
            full = full or tuple(one.new_empty(*shape[:-1], one.shape[-1]) for one in numbers)
            for one, rows in zip(full, numbers):
                part.cut(one).copy_(rows)
        return (full[0], full[1]) if full else None


def rounding(
    model: Any, form: str, device: torch.device, shards: Shards | None = None, outside: Sequence[nn.Module] = ()
) -> Put:
    """What takes each weight to the device as it is loaded, and holds it in ``form`` there, or as floats.

    Arguments are as in `FewBits`.

    Raises:
        ConfigError: CFG04 no weight of the model can be held so.
    """
    few_bits = FewBits(model, form, shards, outside)
    if not few_bits.weights:
        raise none_fits(model, form)

    def put(name: str, weight: torch.Tensor) -> torch.Tensor:
        quantised = few_bits.of(name, weight, device) if name in few_bits.weights else None
        return weight.to(device) if quantised is None else quantised

    return put


def none_fits(model: Any, form: str) -> ConfigError:
    """CFG04."""
    return ConfigError(
        f"no weight of {type(model).__name__} can be held in {form}",
        code="CFG04",
        where="train.base_weights",
        why=f"a linear layer or experts of {FEW_ROWS} rows or more whose columns are a multiple of "
        f"{FORMS[form].block} are",
        fix="--base-weights auto",
    )


def _weights(module: nn.Module) -> Iterator[str]:
    if are_experts(module):
        yield from (key for key in ("gate_up_proj", "up_proj", "down_proj") if key in module._parameters)
    elif isinstance(module, nn.Linear):
        yield "weight"
