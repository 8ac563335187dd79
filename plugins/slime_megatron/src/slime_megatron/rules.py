"""Rules of training with Megatron: what cannot hold, and what has no effect.

Names and values of [megatron] itself are judged where its table lives, `slime_megatron.flags`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

RECOMPUTE = ("recompute_granularity", "recompute_activations", "moe_layer_recompute")
"""Names of [megatron] that say what the backward pass makes again."""

OFFLOADS = {"fsdp_cpu_offload": "optimizer-cpu-offload", "activation_offload": "cpu-offloading"}
"""Keys of [train] that only FSDP reads, and flags of Megatron that do the like."""


def conflicts(config: Config) -> Iterator[Problem]:
    """What cannot hold together where Megatron trains."""
    if config.cluster.device == "cpu":
        yield conflict(
            "train_backend = megatron with device = cpu",
            ["train.train_backend", "cluster.device"],
            why="megatron-core trains on GPUs",
            fix="--train-backend fsdp   or leave device out",
        )
    for name, flag in OFFLOADS.items():
        if getattr(config.train, name):
            yield conflict(
                f"train_backend = megatron with {name}",
                ["train.train_backend", f"train.{name}"],
                why=f"only FSDP reads {name}",
                fix=f"--{flag} in place of --{name.replace('_', '-')}",
            )
    of_fsdp = {"tensor_parallel_size": "--tensor-model-parallel-size N"}
    of_fsdp |= dict.fromkeys(("fsdp_shard_size", "optimizer"), "leave it out")
    for name in config.train.changed(of_fsdp):
        yield conflict(
            f"{name} with train_backend = megatron",
            [f"train.{name}", "train.train_backend"],
            why="only FSDP reads it",
            fix=of_fsdp[name],
        )
    table = {name.replace("-", "_"): value for name, value in config.table("megatron").items()}
    shared, ranks = config.train.context_parallel_size, table.get("context_parallel_size")
    if shared > 1 and ranks not in (None, shared):
        yield conflict(
            f"train.context_parallel_size = {shared} with megatron.context_parallel_size = {ranks}",
            ["train.context_parallel_size", "megatron.context_parallel_size"],
            why="both say how many ranks share a sequence",
            fix="remove one of them",
        )
    both = [name for name in RECOMPUTE if name in table]
    if config.train.gradient_checkpointing and both:
        yield conflict(
            f"gradient_checkpointing and megatron.{both[0]} are both set",
            ["train.gradient_checkpointing", f"megatron.{both[0]}"],
            why="with Megatron gradient_checkpointing means recompute_granularity = full, one layer at a time",
            fix="leave gradient_checkpointing out",
        )
