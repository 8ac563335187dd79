"""Settings that a config leaves to ``auto``: the fastest that fit the memory of its GPU, by the plan.

    max_tokens_per_gpu = 0         what the trainer takes itself, or less
    gradient_checkpointing = auto  off, or on
    fsdp_cpu_offload = auto        off, or on

They depend on the config, the model's config.json and the kind of GPU, never on what is free, so that a rerun chooses
the same. A run's config.toml has what was chosen, and a resume takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.config.sections.train import FEW_TOKENS
from slime_core.errors import SlimeError
from slime_core.memory import GIB
from slime_core.planning.advice import allowed
from slime_core.planning.gpus import GPUS, Gpu, gpu_of
from slime_core.planning.memory import MemoryPlan, fits, replanned
from slime_core.weights.folder import resolve

if TYPE_CHECKING:
    from slime_core.config.schema import Config

OPEN = ("gradient_checkpointing", "fsdp_cpu_offload")
"""Keys that are None where they are ``auto``."""


def gpu_named(name: str, memory: int) -> Gpu:
    """The kind of a GPU by the name that its driver gives it, with its memory in bytes."""
    words = name.lower().replace("-", " ").split()
    kinds = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in words] or [gpu_of(f"gpu={memory / GIB:g}")]
    return replace(min(kinds, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)


def without_plan(config: Config) -> Config:
    """The config with what is ``auto`` switched off, as on a processor."""
    update = {name: False for name in OPEN if getattr(config.train, name) is None}
    return config.model_copy(update={"train": config.train.model_copy(update=update)}) if update else config


def with_plan(config: Config, gpu: Gpu) -> tuple[Config, str]:
    """The config with what is ``auto`` chosen for this kind of GPU, and a line that says what was chosen and why.

    Without a plan, for a backend or a model that has none, nothing is switched on, and the line is empty.
    """
    if config.cluster.gpu_memory_limit:
        gpu = replace(gpu, memory=min(gpu.memory, int(config.cluster.gpu_memory_limit * GIB)))
    plain = without_plan(config)
    if plain is config and config.train.max_tokens_per_gpu:
        return plain, ""
    try:
        first = fits(plain, resolve(config.rollout.hf_checkpoint), gpu)
    except (SlimeError, OSError, ValueError, KeyError):  # whoever opens the model says so
        return plain, ""
    if first.trainer is None:
        return plain, ""
    switches = [
        name for name in OPEN if getattr(config.train, name) is None and allowed(plain, {f"train.{name}": True})
    ]
    tried = [(changes, replanned(first, **changes)) for changes in _choices(plain.train, first, switches)]
    changes, plan = next(((c, p) for c, p in tried if p.fits), tried[-1])
    chosen = plain.model_copy(update={"train": plain.train.model_copy(update=changes)})
    return chosen, _line(changes, first, plan, gpu)


def _choices(train: Any, first: MemoryPlan, names: list[str]) -> Iterator[dict[str, Any]]:
    """Settings from the fastest to the smallest: micro-batches shrink before layers recompute, state offloads last."""
    assert first.trainer is not None
    sizes = [int(train.max_tokens_per_gpu)]
    if not sizes[0]:
        halvings = int(math.log2(max(1, first.trainer.tokens // FEW_TOKENS)))
        sizes += [first.trainer.tokens >> count for count in range(1, halvings + 1)]
    yield {}
    switches: list[dict[str, Any]] = [{}]
    for name in names:
        switches.append(switches[-1] | {name: True})
    for switch in switches:
        for tokens in sizes:
            if switch or tokens != sizes[0]:
                yield switch | ({"max_tokens_per_gpu": tokens} if tokens != sizes[0] else {})


def _line(changes: dict[str, Any], first: MemoryPlan, plan: MemoryPlan, gpu: Gpu) -> str:
    assert plan.trainer is not None
    peak = max((device.peak for device in plan.devices), key=lambda moment: moment.total)
    switched = [f"{name} = true" for name in OPEN if changes.get(name)]
    words = ", ".join([f"micro-batches of {plan.trainer.tokens} tokens", *switched])
    if plan.engine is not None:
        words += f", {plan.engine.sequences} sequences at once"
    text = f"auto: {words}: {peak.total / GIB:.1f} of {gpu.room / GIB:.1f} GiB at most ({peak.phase})"
    if changes:
        text += f"; without, {first.short / GIB:.1f} GiB would be missing"
    return text if plan.fits else f"{text}; the plan says that {plan.short / GIB:.1f} GiB are missing all the same"
