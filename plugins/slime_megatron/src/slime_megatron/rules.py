"""Rules of training with Megatron: what cannot hold, and what has no effect.

Names and values of [megatron] itself are judged where its table lives, `slime_megatron.flags`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

RECOMPUTE = ("recompute_granularity", "recompute_activations", "moe_layer_recompute")
"""Names of [megatron] that say what the backward pass makes again."""

DROPPING = ("mlp", "moe", "shared_experts", "mla_up_proj")
"""Modules that are computed again apart from their layer, which alone knows the rows whose inputs are dropped."""

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
    if config.train.lora_rank:
        yield from _of_adapters(config, table)
    both = [name for name in RECOMPUTE if name in table]
    if config.train.gradient_checkpointing and both:
        yield conflict(
            f"gradient_checkpointing and megatron.{both[0]} are both set",
            ["train.gradient_checkpointing", f"megatron.{both[0]}"],
            why="with Megatron gradient_checkpointing means recompute_granularity = full, one layer at a time",
            fix="leave gradient_checkpointing out",
        )


def _of_adapters(config: Config, table: Mapping[str, Any]) -> Iterator[Problem]:
    """What adapters of Megatron's layers cannot have."""
    train, lora = config.train, "train.lora_rank"
    reasons = {
        "enable_mtp_training": "the layer that predicts further ahead is of the base, which does not change",
        "moe_shared_expert_overlap": "adapters of shared experts sum over ranks within their layers",
    }
    for name, reason in reasons.items():
        if table.get(name):
            fix = f"leave {name} out, or set lora_rank = 0"
            yield conflict(f"megatron.{name} with lora_rank", [f"megatron.{name}", lora], why=reason, fix=fix)
    value = table.get("recompute_modules") or ()
    modules = [name for name in ([value] if isinstance(value, str) else value) if name in DROPPING]
    if train.lora_dropout and modules:
        yield conflict(
            f"lora_dropout with {modules[0]} in megatron.recompute_modules",
            ["train.lora_dropout", "megatron.recompute_modules"],
            why="what is dropped depends on rows that only a whole layer knows when it is computed again",
            fix="--recompute-granularity full   or leave lora_dropout out",
        )
