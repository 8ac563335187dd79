"""Give a model its tensors from its folder one at a time: read, put where they stay, and dropped.

    stored tensors --by name, or as FolderLayout has them--> a weight, whole --put--> the device, in 16 or few bits

So the host holds what stays there, and the weight that is being read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slime_core.errors import TrainerError
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.prediction_layers import prefixes
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import TensorPart

Put = Callable[[str, torch.Tensor], torch.Tensor]
"""What holds a parameter of this full name with these values, on whichever device, in whichever form."""
Places = Mapping[str, Sequence[tuple[str, TensorPart]]]
"""Stored tensors that are parts of a model's, by its name."""


def moved_to(device: torch.device) -> Put:
    """What holds parameters on a device as they are."""
    return lambda name, tensor: tensor.to(device)


@torch.no_grad()
def load_by_name(model: Any, shards: Shards, stored_as: Mapping[str, str], put: Put | None = None) -> None:
    """Fill every tensor of a model; ``stored_as`` has names of the folder, where they are others."""

    def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return shards[stored_as.get(name, name)]

    _load(model, read, put)


@torch.no_grad()
def load_by_places(model: Any, shards: Shards, places: Places, put: Put | None = None) -> None:
    """Fill every tensor of a model of the parts that :func:`places_of` has."""

    def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = places[name]
        if len(parts) == 1:
            return shards[parts[0][0]].view(tensor.shape)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for stored, one in parts:
            one.cut(whole).copy_(shards[stored])
        return whole

    _load(model, read, put)


def _load(model: Any, read: Callable[[str, torch.Tensor], torch.Tensor], put: Put | None) -> None:
    for name, module, key in _tensors(model):
        tensor = getattr(module, key)
        if put is None or key not in module._parameters:
            tensor.copy_(read(name, tensor))
        else:
            hold(module, key, put(name, read(name, tensor).to(tensor.dtype)))


def put_all(model: Any, put: Put) -> None:
    """Put every parameter of a model that has its values already."""
    for name, module, key in _tensors(model):
        if key in module._parameters:
            hold(module, key, put(name, getattr(module, key).data))


def hold(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let a parameter be ``tensor``: a plain one stays the same object, which other modules may share."""
    parameter = module._parameters[key]
    assert parameter is not None
    if type(tensor) is torch.Tensor and tensor.device == parameter.device:
        parameter.data.copy_(tensor)  # the memory of what was read cannot be resized, as offloading does
    elif type(tensor) is torch.Tensor:
        parameter.data = tensor
    else:
        module._parameters[key] = nn.Parameter(tensor, requires_grad=False)


def _tensors(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """What a folder has of a model by full name, tied parameters once, with their modules and names there."""
    every, once = (dict(model.named_parameters(remove_duplicate=one)) for one in (False, True))
    tied = every.keys() - once.keys()
    for name in [name for name in model.state_dict() if name not in tied]:
        path, _, key = name.rpartition(".")
        yield name, model.get_submodule(path), key


def places_of(model: Any, shards: Shards) -> Places | None:
    """Where the tensors of a model lie in its folder; None where transformers alone knows.

    It does of weights whose dtype is the family's own, of operations other than taking stacks apart, and of names that
    a `FolderLayout` cannot explain.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if any(re.search(pattern, name) for pattern in patterns for name, _ in model.named_parameters()):
        return None
    if (places := _places(model, shards)) is None:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)  # prefixes are changed too
        places = _places(model, shards)
    return places


def _places(model: Any, shards: Shards) -> Places | None:
    layout, places, used = FolderLayout(model), dict[str, list[tuple[str, TensorPart]]](), set[str]()
    for name, module, key in _tensors(model):
        try:
            parts = layout.parts(name, getattr(module, key).shape)
        except TrainerError:
            return None
        places[name] = []
        for part in parts:
            stored = next((one for one in layout.names(part.name) if one in shards.infos), None)
            if stored is None or shards.infos[stored].shape != part.shape:
                return None
            places[name].append((stored, part))
            used.add(stored)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    others = (name for name in shards.infos if name not in used and not name.startswith(prefixes(model.config)))
    return None if any(not any(re.search(one, name) for one in ignored) for name in others) else places
