"""Rules of training with Megatron: a resolved stage in; what cannot hold, and what has no effect, out.

Names and values of [megatron] itself are judged where its table lives, `slime_core.trainers.megatron.flags`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

RECOMPUTE = ("recompute_granularity", "recompute_activations", "moe_layer_recompute")
"""Names of [megatron] that say what the backward pass makes again."""
HOOKS = (
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)
"""Functions by path that only Megatron ranks call."""


def conflicts(config: Config) -> Iterator[Problem]:
    """What cannot hold together where Megatron trains."""
    if config.train.train_backend != "megatron":
        return
    if config.cluster.device == "cpu":
        yield conflict(
            "train_backend = megatron with device = cpu",
            ["train.train_backend", "cluster.device"],
            why="megatron-core trains on GPUs",
            fix="--train-backend fsdp   or leave device out",
        )
    names = {name.replace("-", "_") for name in config.megatron}
    both = [name for name in RECOMPUTE if name in names]
    if config.train.gradient_checkpointing and both:
        yield conflict(
            f"gradient_checkpointing and megatron.{both[0]} are both set",
            ["train.gradient_checkpointing", f"megatron.{both[0]}"],
            why="with Megatron gradient_checkpointing means recompute_granularity = full, one layer at a time",
            fix="leave gradient_checkpointing out",
        )


def notices(config: Config) -> Iterator[str]:
    """Sentences about settings that have no effect."""
    if config.megatron and config.train.train_backend != "megatron":
        names, backend = ", ".join(config.megatron), config.train.train_backend
        yield f"[megatron] {names}: no effect with train_backend = {backend}; --train-backend megatron reads them"
    for name in HOOKS if config.train.train_backend != "megatron" else ():
        if getattr(config.train, name):
            yield f"{name}: no effect with train_backend = {config.train.train_backend}, which has no such place"
