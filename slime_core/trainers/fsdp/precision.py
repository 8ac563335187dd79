"""The policy computed in another dtype than it trains in, from the same shards, adapters merged.

Parameters are gathered as they are needed: those of a layer for the time of its pass, the others for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slime_core.trainers.fsdp.adapters import MergedWeights
from slime_core.trainers.fsdp.blocks import layers
from slime_core.trainers.fsdp.model import FsdpPolicy
from slime_core.trainers.fsdp.shards import reshard


@contextmanager
def in_dtype(policy: FsdpPolicy, dtype: torch.dtype) -> Iterator[FsdpPolicy]:
    """A model without shards of its own, for the block; its passes are collectives, and ``policy`` does not change."""
    reshard(policy)
    weights = policy.merged()
    with torch.device("meta"):
        hf = type(policy.hf)(policy.hf.config)
    for name, buffer in policy.hf.named_buffers():
        module, leaf = _place(hf, name)
        module._buffers[leaf] = buffer
    other = FsdpPolicy(hf.eval().requires_grad_(False), chunk=policy.chunk)
    other.packs, other.linear_head, other.fused = policy.packs, policy.linear_head, policy.fused
    other.ranks = policy.ranks.as_context() if policy.ranks is not None else None
    names = {module: name for name, module in hf.named_modules()}
    inside: set[str] = set()
    for layer in layers(hf):
        of_layer = [f"{names[layer]}.{name}" for name, _ in layer.named_parameters(remove_duplicate=False)]
        inside.update(of_layer)
        _gather_during(layer, hf, of_layer, weights, policy.device, dtype)
    outside = [name for name in weights.parameters if name not in inside]
    _fill(hf, outside, weights, policy.device, dtype)
    try:
        yield other
    finally:
        for name in outside:  # hooks and modules refer to each other: the memory would stay until a collection
            module, leaf = _place(hf, name)
            module._parameters[leaf] = None


def _gather_during(
    layer: nn.Module,
    hf: nn.Module,
    names: Sequence[str],
    weights: MergedWeights,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Have a layer hold whole parameters while it computes."""
    empty = {name: _place(hf, name)[0]._parameters[name.rpartition(".")[2]] for name in names}

    def drop(*_: Any) -> None:
        for name, parameter in empty.items():
            module, leaf = _place(hf, name)
            module._parameters[leaf] = parameter

    layer.register_forward_pre_hook(lambda *_: _fill(hf, names, weights, device, dtype))
    layer.register_forward_hook(drop)


def _fill(
    hf: nn.Module, names: Sequence[str], weights: MergedWeights, device: torch.device, dtype: torch.dtype
) -> None:
    """Give modules their whole parameters; those that are tied are gathered once. A collective."""
    gathered: dict[int, nn.Parameter] = {}
    for name in names:
        shard = weights.parameters[name]
        if id(shard) not in gathered:
            gathered[id(shard)] = nn.Parameter(weights.whole(name, dtype).to(device), requires_grad=False)
        module, leaf = _place(hf, name)
        module._parameters[leaf] = gathered[id(shard)]


def _place(hf: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of a parameter or buffer, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return hf.get_submodule(owner), leaf
