"""Hold the frozen base of a stage's adapters in 4 or 8 bits, with the numbers that FSDP has.

    weights of transformers --rounded--> numbers and scales of their rows --bridge--> this rank's rows of a layer

A row has all its scales, so a layer that is several of transformers' has their rows, and a rank its share of them.
Where ranks share columns, those of a rank may cut blocks: then all of its blocks are narrower, and numbers stay.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime_convert.bridge import join, shard
from slime_core.kernels.quantised import QuantisedWeight, dense
from slime_core.lora.base_weights import FewBits, none_fits
from slime_core.media.features import tower
from slime_core.weights.build import skeleton
from slime_megatron.adapter_entries import spots
from slime_megatron.tensors import LocalTensor, Tensors, canonical, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slime_core.weights.folder import ModelFolder
    from slime_megatron.model import ModelStage

Tensor = torch.Tensor
PLAIN = torch.contiguous_format


@torch.no_grad()
def fill(stage: ModelStage, tensors: Tensors, folder: ModelFolder, form: str, seed: int, device: torch.device) -> None:
    """Read the weights of a stage onto the device, those of linear layers and experts in ``form``; in place.

    Each is read, rounded and dropped before the next. The stage is on the host, where parameters that are never
    written take no memory. A layer of which a part stays floats, such as a few rows of keys, has the floats of its
    rounded parts.

    Raises:
        ConfigError: CFG04 no weight of the model can be held so.
    """
    model: Any = skeleton(folder.config, trust_remote_code=folder.trust_remote_code)
    shards = folder.tensors() if folder.init_weights == "load" else None
    few_bits, weights = FewBits(model, form, shards, tower(model)), stored(folder, seed)
    if not few_bits.weights:
        raise none_fits(model, form)
    places = {
        canonical(f"{prefix}.{leaf}", chunk): (module, leaf)
        for chunk in stage.chunks
        for prefix, module in chunk.named_modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    }
    for name, local in list(tensors.by_name.items()):
        parts = _parts(local, tensors, few_bits, weights, device) if name in places else []
        if parts and all(isinstance(one, QuantisedWeight) for one in parts):
            quantised = nn.Parameter(_joined(local, parts, tensors), requires_grad=False)  # type: ignore[arg-type]
            quantised.__dict__ |= local.tensor.__dict__  # what megatron-core notes of it
            module, leaf = places[name]
            module._parameters[leaf] = quantised
            tensors.by_name[name] = LocalTensor(local.entry, quantised)
            continue
        local.tensor.copy_(
            _shard(local, list(map(dense, parts)), tensors) if parts else tensors.shard_of(local, weights)
        )
        local.tensor.data = local.tensor.data.to(device)
    for parameter in stage.parameters():  # what is no tensor of its own, such as a tied output matrix
        if parameter.device != device:
            parameter.data = parameter.data.to(device)


def _parts(
    local: LocalTensor, tensors: Tensors, few_bits: FewBits, weights: Mapping[str, Tensor], device: torch.device
) -> list[Tensor | QuantisedWeight]:
    """The whole tensors of a folder that a layer's weight is made of, rounded; nothing where none of them is."""
    dtype, parts = local.tensor.dtype, list[Tensor]()
    places = list(zip(local.entry.hf, spots(local.entry, tensors), strict=True))
    if not any(spot.name in few_bits.weights for _, spot in places):
        return []
    for name, group in groupby(places, key=lambda place: place[1].name):  # gate and up of an expert are one weight
        of_name = list(group)
        floats = [weights[stored_name].to(device, dtype) for stored_name, _ in of_name]
        rounded, first = None, of_name[0][1].begin // floats[0].shape[-1]
        if name in few_bits.weights:
            rounded = few_bits.of(name, torch.cat(floats), device, first=first)
        parts += floats if rounded is None else rounded.split([len(one) for one in floats])
    return parts


def _joined(local: LocalTensor, parts: list[QuantisedWeight], tensors: Tensors) -> QuantisedWeight:
    """This rank's shard of a layer's weight."""
    numbers, scales, form = [one.numbers for one in parts], [one.scales for one in parts], parts[0].form
    if local.entry.kind == "columns":
        width = math.gcd(form.block, local.tensor.shape[1])
        scales = [one.repeat_interleave(form.block // width, 1) for one in scales]
        form = replace(form, block=width)
    rows, of_rows = (_shard(local, one, tensors).clone(memory_format=PLAIN) for one in (numbers, scales))
    return QuantisedWeight(rows, of_rows, form, local.tensor.dtype)


def _shard(local: LocalTensor, parts: list[Tensor], tensors: Tensors) -> Tensor:
    return shard(local.entry, join(local.entry, parts, tensors.sizes), local.group.rank(), local.group.size())
