"""Shards of a model's tensors: how FSDP2 cuts them, and one rank's part of each."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def shard_modules(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    exact: Sequence[nn.Module] = (),
    *,
    on_host: bool = False,
    cast_inputs: bool = True,
) -> None:
    """Shard the parameters of each module that no earlier one has, computing in ``dtype``.

    ``exact`` modules compute in the dtype they have. Gradients are summed over ranks in float32. Shards and gradients
    lie in host memory where they are ``on_host``; ``cast_inputs`` of modules to ``dtype``, too.
    """
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    for module in modules:
        dtypes = replace(MixedPrecisionPolicy() if module in exact else precision, cast_forward_inputs=cast_inputs)
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=dtypes, offload_policy=offload)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters after passes with no backward, so that the next pass sees what the shards hold."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
    """All ranks' shards as one plain tensor, on the device that ranks talk by; a collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    part = tensor.to_local().to(mesh.device_type)
    for cut in reversed(_cuts(tensor)):
        submesh = mesh[mesh.mesh_dim_names[cut.mesh_dim]] if mesh.mesh_dim_names else mesh
        stride = torch.empty(cut.whole, device="meta").stride()
        joined: Any = DTensor.from_local(part, submesh, [Shard(cut.axis)], shape=cut.whole, stride=stride)
        part = joined.full_tensor()
    return part


def first(parameter: torch.Tensor) -> tuple[int, ...]:
    """The place in the whole tensor, by axis, at which this rank's shard begins."""
    starts = [0] * parameter.ndim
    for cut in _cuts(parameter):
        starts[cut.axis] += cut.start
    return tuple(starts)


class _Cut(NamedTuple):
    """What a dimension of a mesh leaves of a tensor on this rank."""

    mesh_dim: int
    axis: int
    start: int
    whole: torch.Size  # before it


def _cuts(parameter: torch.Tensor) -> list[_Cut]:
    """Cuts of a tensor in their order: the last dimension of the mesh, that of tensor parallelism, cuts first."""
    cuts: list[_Cut] = []
    if not isinstance(parameter, DTensor):
        return cuts
    mesh, sizes = parameter.device_mesh, list(parameter.shape)
    for mesh_dim, axis in reversed(list(enumerate(map(_axis, parameter.placements)))):
        if axis is not None:
            chunk = -(-sizes[axis] // mesh.size(mesh_dim))
            start = min(sizes[axis], mesh.get_local_rank(mesh_dim) * chunk)
            cuts.append(_Cut(mesh_dim, axis, start, torch.Size(sizes)))
            sizes[axis] = min(chunk, sizes[axis] - start)
    return cuts


def _axis(placement: Placement) -> int | None:
    """The axis that a dimension of a mesh cuts; None where its ranks have copies."""
    return getattr(placement, "dim", None)


def own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor that every rank has."""
    if not isinstance(parameter, DTensor):
        return whole
    part = whole
    for axis, (start, size) in enumerate(zip(first(parameter), local(parameter).shape)):
        part = part.narrow(axis, start, size)
    return part.to(parameter.device)


def copy_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which copy of its shard this rank has, of how many on the tensor's mesh."""
    number, count = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for mesh_dim, placement in enumerate(tensor.placements):
            if _axis(placement) is None:
                number = number * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
                count *= mesh.size(mesh_dim)
    return number, count


def by_rows(tensor: DTensor) -> DTensor:
    """The tensor cut along its rows alone, so that a shard is one run of its elements; a collective."""
    placements = [Replicate() if _axis(one) else one for one in tensor.placements]
    return tensor if placements == list(tensor.placements) else tensor.redistribute(placements=placements)


def own_runs(
    tensors: Mapping[str, torch.Tensor], world: int, copies: Container[str] = ()
) -> dict[str, tuple[torch.Tensor, int]]:
    """This rank's rows of each tensor, with the element that is their first: every row on one rank alone.

    Of a tensor that every rank has whole, the first one counts; ``copies`` are shards that count on another rank. A
    collective.
    """
    runs = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        counts = name not in copies
        if isinstance(tensor, DTensor):
            tensor = by_rows(tensor)
            counts = counts and copy_of(tensor)[0] == 0
        elif world > 1:
            counts = dist.get_rank() == 0
        part = local(tensor)
        runs[name] = (part if counts else part[:0], sum(first(tensor)[:1]) * tensor.shape[1:].numel())
    return runs
