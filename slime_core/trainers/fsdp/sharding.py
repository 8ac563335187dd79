"""A module in, the module sharded over data-parallel ranks out; one process needs no launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slime_core.trainers.fsdp.policy import Policy, layers


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype, exact: Sequence[nn.Module] = ()) -> None:
    """Shard every block and the rest, computing in ``dtype``, ``exact`` modules in the dtype they have.

    Gradients are summed in float32.
    """
    half = dtype != torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    keep = mesh.size() == 1  # nothing is saved by freeing what one rank holds anyway
    modules: list[nn.Module] = [*exact, *layers(policy.hf), policy]
    for module in modules:
        own = MixedPrecisionPolicy() if module in exact else precision
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=own, reshard_after_forward=not keep)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard_: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local shard as a DTensor with ``parameter``'s placement."""
    if not isinstance(parameter, DTensor):
        return shard_
    return DTensor.from_local(
        shard_, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' shards as one plain tensor; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_row(parameter: torch.Tensor) -> int:
    """The row of the whole tensor with which this rank's shard begins."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))


def own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor that every rank has."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    chunks = list(torch.chunk(whole, mesh.size(), dim=0))
    mine = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else whole[:0]
    return mine.to(parameter.device)


def reshard(policy: Policy) -> None:
    """Drop gathered parameters after passes with no backward, so that the next pass sees what the shards hold."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
