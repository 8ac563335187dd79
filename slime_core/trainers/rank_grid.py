"""How the ranks of an FSDP trainer share weights, sequences and tensors.

    rank = tensor + TENSOR * (context + CONTEXT * data)

Ranks of one ``data`` number compute the same samples together. Each ``shard`` consecutive ranks hold the weights once
between them, whatever they compute. It is arithmetic alone: a grid is refused before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

KEYS = {
    "context": "train.context_parallel_size",
    "tensor": "train.tensor_parallel_size",
    "shard": "train.fsdp_shard_size",
}
WORLD = ["cluster.actor_num_nodes", "cluster.actor_num_gpus_per_node"]


@dataclass(slots=True, frozen=True, kw_only=True)
class RankGrid:
    """Sizes by which ranks are numbered.

    Example:
        RankGrid(world=8, context=2, tensor=2).data == 2
    """

    world: int
    context: int = 1  # ranks that share each sequence
    tensor: int = 1  # ranks that share each matrix product
    shard: int = 0  # ranks that hold the weights once; 0 is all

    @classmethod
    def of(cls, config: Config, world: int) -> RankGrid:
        """The grid of a run's [train] section."""
        train = config.train
        return cls(
            world=world,
            context=train.context_parallel_size,
            tensor=train.tensor_parallel_size,
            shard=train.fsdp_shard_size,
        )

    @property
    def sequence(self) -> int:
        """Ranks that have the rows of a pack between them."""
        return self.context * self.tensor

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.world // self.sequence

    @property
    def shards(self) -> int:
        """Ranks that hold the weights once."""
        return self.shard or self.world


def conflicts(config: Config) -> Iterator[Problem]:
    """Sizes that the ranks do not divide by, and what no group of ranks can compute."""
    cluster, train = config.cluster, config.train
    world = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    grid = RankGrid.of(config, world)
    ranks = f"{cluster.actor_num_nodes} * {cluster.actor_num_gpus_per_node} = {world} trainer ranks"
    if world % grid.sequence:
        changed = [KEYS[name] for name in ("context", "tensor") if getattr(grid, name) > 1]
        yield conflict(
            f"{ranks} do not divide into groups of context_parallel_size * tensor_parallel_size = {grid.sequence}",
            [*changed, *WORLD],
            why="ranks of a group compute the same samples, and all groups are of one size",
            fix=f"--actor-num-gpus-per-node {-(-world // grid.sequence) * grid.sequence}, or smaller groups",
        )
    elif world % grid.shards or grid.shards % grid.tensor:
        yield conflict(
            f"fsdp_shard_size = {grid.shard} does not fit {ranks} with tensor_parallel_size = {grid.tensor}",
            [KEYS["shard"], *WORLD],
            why="each fsdp_shard_size consecutive ranks hold the weights once; tensor-parallel groups are not split",
            fix=f"set fsdp_shard_size to a multiple of {grid.tensor} that divides {world}, or leave it out",
        )
    if train.true_on_policy_mode and grid.sequence > 1:
        yield conflict(
            "true_on_policy_mode with ranks that share sequences",
            ["train.true_on_policy_mode", *(KEYS[name] for name in ("context", "tensor") if getattr(grid, name) > 1)],
            why="the embedded engine computes each sequence on one device, in another order of sums",
            fix="--no-true-on-policy-mode   or   --context-parallel-size 1 --tensor-parallel-size 1",
        )
