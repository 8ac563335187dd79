"""Tensor parallelism of a transformers model, by its own plan (``base_model_tp_plan``), with DTensors.

    own rows -> norm -> [gather rows] -> q k v, own heads -> attention -> o -> [sum, scatter rows] -> own rows
                     -> [gather rows] -> gate up, own columns ---------> down -> [sum, scatter rows]

Between the products each rank has its own rows of the pack (sequence parallelism, Korthikanti et al. 2022, arXiv
2205.05198). So what is whole on every rank, embedding, norms and output matrix, has a part of its gradient on each.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from slime_core.errors import ConfigError
from slime_core.trainers.fsdp.shards import local
from slime_core.weights.vision import sees

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.ranks import FsdpRanks

NEW = hasattr(collectives, "all_gather_single_autograd")  # other names from torch 2.13 on
_ALL_GATHER: Any = getattr(collectives, "all_gather_single_autograd" if NEW else "all_gather_tensor_autograd")
_REDUCE_SCATTER: Any = getattr(
    collectives, "reduce_scatter_single_autograd" if NEW else "reduce_scatter_tensor_autograd"
)
KEY = "train.tensor_parallel_size"
COLUMN, ROW, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
HEADS = ("num_attention_heads", "num_key_value_heads")


def split_products(hf: Any, ranks: FsdpRanks) -> None:
    """Give this rank its part of each product of the layers, before the model is sharded.

    Raises:
        ConfigError: CFG04 a model without a plan for it, or with sizes that the ranks do not divide.
    """
    if ranks.lanes == 1:
        return
    plan, size = _plan(hf), ranks.lanes
    _check_sizes(hf, size)
    parents: dict[nn.Module, None] = {}
    for name, module in hf.base_model.named_modules():
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), WHOLE)
        if style != WHOLE:
            _split_linear(module, style, ranks.tensor)
            if style == COLUMN:
                parents[hf.base_model.get_submodule(name.rpartition(".")[0])] = None
    group = ranks.tensor.get_group()
    for parent in parents:
        parent.register_forward_pre_hook(lambda _, args, kwargs: _gather_input(args, kwargs, group), with_kwargs=True)
    hf.base_model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: _gather_positions(args, kwargs, group), with_kwargs=True
    )


def _plan(hf: Any) -> dict[re.Pattern[str], str]:
    """The styles of modules in layers, by the pattern of their names; the embedding stays whole."""
    every: dict[str, str] = getattr(hf.config, "base_model_tp_plan", None) or {}
    plan = {name: style for name, style in every.items() if name.startswith("layers.")}
    odd = sorted({*plan.values()} - {COLUMN, ROW, WHOLE})
    if plan and not odd and hasattr(hf.base_model, "rotary_emb"):
        return {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    reason = f"its plan has {', '.join(odd)}, which {COLUMN} and {ROW} products do not cover" if odd else ""
    if sees(hf.config):
        reason = "it sees pictures, whose features are not divided among the ranks of a product"
    raise ConfigError(
        f"{type(hf).__name__} cannot be trained with tensor_parallel_size",
        code="CFG04",
        where=KEY,
        why=reason or "transformers has no plan (base_model_tp_plan) of its products",
        fix="--context-parallel-size N shares sequences instead; weights are sharded over all ranks anyway",
    )


def _check_sizes(hf: Any, size: int) -> None:
    sizes = {name: getattr(hf.config, name, size) for name in (*HEADS, "intermediate_size")}
    odd = [f"{name} = {value}" for name, value in sizes.items() if value % size]
    if odd:
        raise ConfigError(
            f"tensor_parallel_size = {size} does not divide {' and '.join(odd)}",
            code="CFG04",
            where=KEY,
            why="each rank has as many heads, and as many columns of the MLP, as the others",
            fix="lower tensor_parallel_size; context_parallel_size takes any number of heads",
        )


def _split_linear(module: Any, style: str, mesh: DeviceMesh) -> None:
    """Keep this rank's rows of a weight (its output's columns), or its columns, and compute with them."""
    axis, rank, group = int(style == ROW), mesh.get_local_rank(), mesh.get_group()
    for name, parameter in list(module.named_parameters(recurse=False)):
        if style == COLUMN or name == "weight":
            part = parameter.detach().chunk(mesh.size(), axis)[rank].clone()
            module.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(axis)])))

    def column(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, local(module.weight), None if module.bias is None else local(module.bias))

    def row(x: torch.Tensor) -> torch.Tensor:
        part = nn.functional.linear(x[0], local(module.weight))
        rows: torch.Tensor = _REDUCE_SCATTER(part, "sum", 0, group)[None]
        return rows if module.bias is None else rows + module.bias

    module.forward = column if style == COLUMN else row


def _gather_input(args: Any, kwargs: Any, group: Any) -> tuple[Any, Any]:
    """A module's hidden states [1, own rows, hidden] as those of all ranks of the group, rank after rank."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _gather(kwargs["hidden_states"], group)}
    return (_gather(args[0], group), *args[1:]), kwargs


def _gather_positions(args: Any, kwargs: Any, group: Any) -> tuple[Any, Any]:
    """The positions of those rows."""
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _gather(kwargs["position_ids"], group)}
    return (args[0], _gather(args[1], group), *args[2:]), kwargs


def _gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """[1, own rows, ...] to [1, rows of all ranks, ...]."""
    gathered: torch.Tensor = _ALL_GATHER(rows[0], 0, group)[None]
    return gathered
