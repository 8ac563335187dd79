"""The frozen base of adapters in 4 or 8 bits (QLoRA): linear layers and experts, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime_core.errors import ConfigError
from slime_core.kernels.quantised import FORMS, QuantisedWeight
from slime_core.lora.layers import are_experts
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.shards import Shards

if TYPE_CHECKING:
    from slime_core.weights.folder import ModelFolder

FEW_ROWS = 64
"""Fewer than these are gates and the like, which weigh little and decide much."""


def quantise(
    model: Any, form: str, device: torch.device, folder: ModelFolder | None = None, outside: Sequence[nn.Module] = ()
) -> None:
    """Hold linear layers and stacked experts of a model of transformers in ``form``, on the device; in place.

    Each goes to the device alone, in the dtype that the model computes in. Embedding, output head, norms, layers of a
    few rows, and rows that are not whole blocks, stay floats, and where they are.

    Args:
        folder: that the model was built from: weights that it stores in fp8 keep their numbers
        outside: modules that stay as they are, such as a vision tower

    Raises:
        ConfigError: CFG04 no weight of the model can be held so.
    """
    head = model.get_output_embeddings()
    left_out = {id(module) for one in outside for module in one.modules()} | {id(head)}
    count, stored = 0, _stored(folder) if form == "fp8" else _nothing
    for name, module in list(model.named_modules()):
        if id(module) in left_out:
            continue
        for key in _weights(module):
            weight = getattr(module, key)
            if weight.shape[-1] % FORMS[form].block or weight.shape[-2] < FEW_ROWS:
                continue
            numbers = stored(f"{name}.{key}")
            if numbers is not None:
                quantised = QuantisedWeight.of_blocks(*numbers, weight.dtype).to(device)
            else:
                quantised = QuantisedWeight.of(weight.data.to(device), form, weight.dtype)
            module._parameters[key] = nn.Parameter(quantised, requires_grad=False)
            count += 1
    if not count:
        raise ConfigError(
            f"no weight of {type(model).__name__} can be held in {form}",
            code="CFG04",
            where="train.base_weights",
            why=f"a linear layer or experts of {FEW_ROWS} rows or more whose columns are a multiple of "
            f"{FORMS[form].block} are",
            fix="--base-weights auto",
        )


def _weights(module: nn.Module) -> tuple[str, ...]:
    if are_experts(module):
        return tuple(key for key in ("gate_up_proj", "up_proj", "down_proj") if key in module._parameters)
    return ("weight",) if isinstance(module, nn.Linear) else ()


def _nothing(name: str) -> None:
    return None


def _stored(folder: ModelFolder | None) -> Callable[[str], tuple[torch.Tensor, torch.Tensor] | None]:
    """Numbers and scales of a weight that the folder stores in the blocks of the trainer."""
    if folder is None or folder.init_weights == "random" or not isinstance(folder.stored_in, BlockFormat):
        return _nothing
    tensors: Mapping[str, torch.Tensor] = folder.tensors()
    if folder.stored_in.block != BlockFormat().block or not isinstance(tensors, Shards):
        return _nothing
    return tensors.stored
