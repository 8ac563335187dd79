"""The policy computed in another dtype than it trains in, from the same shards.

Parameters are gathered as they are needed: those of a layer for the time of its pass, the others for all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slime_core.trainers.fsdp.blocks import layers
from slime_core.trainers.fsdp.model import FsdpPolicy
from slime_core.trainers.fsdp.shards import full, reshard


def in_dtype(policy: FsdpPolicy, dtype: torch.dtype) -> FsdpPolicy:
    """A model without shards of its own; its passes are collectives, and nothing of ``policy`` changes."""
    reshard(policy)
    parameters = policy.all_names()
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
        _gather_during(layer, hf, {name: parameters[name] for name in of_layer}, policy.device, dtype)
    _fill(hf, {name: tensor for name, tensor in parameters.items() if name not in inside}, policy.device, dtype)
    return other


def _gather_during(
    layer: nn.Module, hf: nn.Module, shards: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Have a layer hold whole parameters while it computes."""
    empty = {name: _place(hf, name)[0]._parameters[name.rpartition(".")[2]] for name in shards}

    def drop(*_: Any) -> None:
        for name, parameter in empty.items():
            module, leaf = _place(hf, name)
            module._parameters[leaf] = parameter

    layer.register_forward_pre_hook(lambda *_: _fill(hf, shards, device, dtype))
    layer.register_forward_hook(drop)


def _fill(hf: nn.Module, shards: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Give modules their whole parameters; those that are tied are gathered once. A collective."""
    gathered: dict[int, nn.Parameter] = {}
    for name, shard in shards.items():
        if id(shard) not in gathered:
            gathered[id(shard)] = nn.Parameter(full(shard.detach()).to(device, dtype), requires_grad=False)
        module, leaf = _place(hf, name)
        module._parameters[leaf] = gathered[id(shard)]


def _place(hf: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of a parameter or buffer, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return hf.get_submodule(owner), leaf
