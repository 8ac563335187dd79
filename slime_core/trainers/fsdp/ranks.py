"""The process groups and device meshes of an FSDP trainer's ranks, and what one of them has of a pack's rows."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime_core.errors import ConfigError
from slime_core.trainers.fsdp.exchange import HeadExchange

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.trainers.rank_grid import RankGrid


class FsdpRanks:
    """This rank's place in each group of a `rank_grid.RankGrid`; making it is a collective.

    Row i of a pack is of rank i % ``size`` of the ``size`` ranks that share it: so each has as many response rows as
    the others, within one a sequence.
    """

    def __init__(self, grid: RankGrid, rank: int, device: str) -> None:
        self.grid, self.world, self.size = grid, grid.world, grid.sequence
        self.data, self.number = divmod(rank, grid.sequence)
        copies = grid.world // grid.shards
        several = {"copy": copies} if copies > 1 else {}
        self.weights = _mesh(device, **several, shard=grid.shards)
        self.sequence = self.context = _group(device, "sequence", data=grid.data, sequence=self.size)
        self.lanes = grid.tensor  # ranks that share each product; each has its own lane of rows beside them
        if self.lanes > 1:
            self.context = _group(device, "context", data=grid.data, context=grid.context, tensor=self.lanes)
            mesh = _mesh(device, **several, shard=grid.shards // self.lanes, tensor=self.lanes)
            self.layers, self.tensor = mesh["copy", "shard"] if several else mesh["shard"], mesh["tensor"]

    @property
    def lane(self) -> int:
        """This rank's among those that share its products."""
        return self.number % self.lanes

    def as_context(self) -> FsdpRanks:
        """The same ranks for a model whose products are not shared."""
        ranks = copy.copy(self)
        ranks.lanes, ranks.context = 1, self.sequence
        return ranks

    def places(self, count: int) -> NDArray[np.int64]:
        """This rank's rows of ``count``, as many as the others have; the last may lie behind the end."""
        return np.arange(self.number, -(-count // self.size) * self.size, self.size)

    def own_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of some rows of a pack this rank has, as indices."""
        return np.flatnonzero(rows % self.size == self.number)

    def exchange(self, count: int) -> HeadExchange | None:
        """How attention over a pack of ``count`` rows comes to whole sequences; None where a rank has all rows."""
        if self.size == 1:
            return None
        return HeadExchange(self.context, self.size // self.lanes, self.number // self.lanes, count, self.lanes)

    def spread(self, values: torch.Tensor, rows: NDArray[np.int64], count: int) -> torch.Tensor:
        """Values [r] of each rank's ``rows`` as all of them on every rank, [count]; a collective.

        Every rank computes the same of the whole, so the gradient of its own rows is complete as it is.
        """
        if self.size == 1:
            return values
        places = torch.from_numpy(rows).to(values.device)
        return _SpreadTokens.apply(values, places, count, self.sequence)  # type: ignore[no-any-return, no-untyped-call]


def _mesh(device: str, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _group(device: str, name: str, **sizes: int) -> Any:
    """This rank's group along a dimension of a mesh; None where it is alone."""
    return _mesh(device, **sizes)[name].get_group() if sizes[name] > 1 else None


def check_packs(model: Any, packs: bool, ranks: FsdpRanks) -> None:
    """Refuse a model whose sequences several ranks cannot share.

    Raises:
        ConfigError: CFG04.
    """
    if ranks.size > 1 and not packs:
        raise ConfigError(
            f"{type(model).__name__} computes each sequence on one rank",
            code="CFG04",
            where="train.context_parallel_size",
            why="ranks share the sequences of a pack, and this model cannot be packed (the log says why)",
            fix="--context-parallel-size 1 --tensor-parallel-size 1",
        )


class _SpreadTokens(torch.autograd.Function):
    """See `FsdpRanks.spread`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(rows)
        column = values.new_zeros(count).index_copy_(0, rows, values)
        dist.all_reduce(column, group=group)
        return column

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grads[0].index_select(0, rows), None, None, None
