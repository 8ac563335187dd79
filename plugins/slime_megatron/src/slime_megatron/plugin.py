"""Megatron-core as `train_backend = "megatron"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import slime_core
from slime_core.backends import Plan, Planning, TrainerBackend

if TYPE_CHECKING:
    import click

    from slime_core.config.problems import Origins, Problem
    from slime_core.config.schema import Config
    from slime_core.planning.footprint import Subject, TrainerFootprint
    from slime_megatron.trainer import MegatronTrainer

RESUMABLE = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "sequence_parallel",
        "make_vocab_size_divisible_by",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "recompute_activations",
        "moe_layer_recompute",
        "distribute_saved_activations",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_double_buffering",
        "fine_grained_activation_offloading",
        "offload_modules",
        "min_offloaded_tensor_size",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_distributed_optimizer",
        "ddp_bucket_size",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
    }
)
"""Names of [megatron] that say where the mathematics happens, or with what memory; others change what is learnt."""


@slime_core.hookimpl
def slime_trainer() -> list[TrainerBackend]:
    """Megatron-core, unpatched."""
    return [
        TrainerBackend(
            name="megatron",
            library="megatron.core",
            flags=_flags,
            options=_options,
            markdown=_markdown,
            problems=_problems,
            rules=_rules,
            notices=_notices,
            plan=_plan,
            resumable=RESUMABLE,
            trainer=_trainer,
            megatron_hooks=True,
            converters=_converters,
            memory=_memory,
        )
    ]


def _flags() -> Mapping[str, Any]:
    from slime_megatron.flags import kinds

    return kinds()


def _options() -> list[dict[str, str]]:
    from slime_megatron.planning import option_rows

    return option_rows()


def _markdown(rows: list[dict[str, str]]) -> str:
    from slime_megatron.planning import markdown

    return markdown(rows)


def _problems(config: Config, origins: Origins) -> Iterable[Problem]:
    from slime_megatron.flags import problems

    return problems(config.table("megatron"), train=config.train)


def _rules(config: Config) -> Iterable[Problem]:
    from slime_megatron import rules

    return rules.conflicts(config)


def _notices(config: Config) -> Iterable[str]:
    from slime_megatron.flags import values

    return values(config.table("megatron")).notices


def _plan(planning: Planning) -> Plan | None:
    from slime_megatron.planning import plan

    return plan(planning)


def _trainer() -> type[MegatronTrainer]:
    from slime_megatron.trainer import MegatronTrainer

    return MegatronTrainer


def _memory(subject: Subject) -> TrainerFootprint:
    from slime_megatron.memory import footprint

    return footprint(subject)


def _converters() -> Mapping[str, click.Command]:
    from slime_megatron.convert.command import WORDS

    return WORDS
