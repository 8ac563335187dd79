"""Torch's tensors to and from what travels (`wire.Leaf`). Runs inside the judge's processes alone; loads torch."""

from __future__ import annotations

from typing import Any

import torch

from slime_kernelbench.judge.wire import ITEMSIZES, Leaf, Tree

_DTYPES = {name: getattr(torch, name) for name in ITEMSIZES}


def to_wire(value: Any) -> Tree:
    """A tree of tensors and plain values as it travels. Raises `TypeError` where something else is in it."""
    if isinstance(value, torch.Tensor):
        return leaf_of(value)
    if isinstance(value, dict):
        return {str(key): to_wire(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(to_wire, value)) if type(value) in (tuple, list) else tuple(map(to_wire, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is not a tensor")


def leaf_of(tensor: torch.Tensor) -> Leaf:
    """One tensor, copied to the host."""
    detached = tensor.detach()
    kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else "Tensor"
    plain = detached.to("cpu").contiguous()
    data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Leaf(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=data,
        stride=tuple(tensor.stride()),
        kind=kind,
        device=tensor.device.type,
    )


def of_wire(tree: Tree, device: str = "cpu") -> Any:
    """What travelled, with tensors of its own memory."""
    if isinstance(tree, Leaf):
        dtype = _DTYPES[tree.dtype]
        if not len(tree.data):
            return torch.empty(tree.shape, dtype=dtype, device=device)
        flat = torch.frombuffer(bytearray(tree.data), dtype=dtype)
        return flat.reshape(tree.shape).to(device)
    if isinstance(tree, dict):
        return {key: of_wire(item, device) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(of_wire(item, device) for item in tree)
    return tree


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in what a model took or gave, in order; anything else in it is passed over."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
