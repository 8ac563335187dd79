"""Settings that a config leaves to ``auto``: the fastest that fit the memory of its GPU, by the plan.

    rollout_slots = 0              a step's samples, as many as the cache holds, or fewer
    max_tokens_per_gpu = 0         what the trainer takes itself, or less
    gradient_checkpointing = auto  off, or on
    fsdp_cpu_offload = auto        off, or on

They depend on the config, the model's config.json and the kind of GPU, or a machine's main memory, never on what is
free, so that a rerun chooses the same. A run's config.toml has what was chosen, and a resume takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.config.sections.train import FEW_TOKENS
from slime_core.config.stages import LEAST_SLOTS, MOST_SLOTS, rollout_slots, stages
from slime_core.memory import GIB
from slime_core.planning.advice import Advice, allowed, cost, largest_slots, subsets
from slime_core.planning.gpus import GPUS, Gpu, gpu_of
from slime_core.planning.memory import LengthsOf, MemoryPlan, fits, replan, with_keys
from slime_core.plugins.backends import engine_of
from slime_core.weights.folder import resolve

if TYPE_CHECKING:
    from slime_core.config.schema import Config

OPEN = ("train.gradient_checkpointing", "train.fsdp_cpu_offload")
"""Switches that are None where they are ``auto``."""
TOKENS_KEY, SLOTS_KEY = "train.max_tokens_per_gpu", "rollout.rollout_slots"
"""Numbers that are 0 where they are ``auto``."""
FEWEST = 8  # slots, where nothing fits


def gpu_named(name: str, memory: int) -> Gpu:
    """The kind of a GPU by the name that its driver gives it, with its memory in bytes."""
    words = name.lower().replace("-", " ").split()
    kinds = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in words] or [gpu_of(f"gpu={memory / GIB:g}")]
    return replace(min(kinds, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)


def without_plan(config: Config, device: str = "") -> Config:
    """The config with what is ``auto`` as the config alone has it: nothing is switched on.

    Args:
        device: in place of the config's, where it is not that of this machine
    """
    keys: dict[str, Any] = dict.fromkeys(_switches(config), False)
    return with_keys(config, keys | ({SLOTS_KEY: rollout_slots(config, device)} if _open_slots(config) else {}))


def with_plan(config: Config, gpu: Gpu, lengths: LengthsOf | None = None, main_memory: int = 0) -> tuple[Config, str]:
    """The config with what is ``auto`` chosen for this kind of GPU or processor, and a line that says what and why.

    Without a plan, for a backend or a model that has none, it is that of `without_plan`, and the line is empty.

    Args:
        lengths: of a stage; None takes the most that the config allows
        main_memory: bytes of the machine that has the GPUs; 0 where it is not known
    """
    plain = without_plan(config, "cpu" if gpu.processor else "cuda")
    slots, tokens = _open_slots(config), not (gpu.processor or config.train.max_tokens_per_gpu)
    if not (slots or tokens or (_switches(config) and not gpu.processor)):
        return plain, ""
    try:
        plan = fits(plain, resolve(config.rollout.hf_checkpoint), gpu, lengths=lengths)
    except Exception:  # a forecast, of whatever model: whoever opens it says what is wrong
        return plain, ""
    if not any(stage.devices for stage in plan.stages):
        return plain, ""
    if plan.fits and not (slots or _switches(config)):
        return plain, ""
    best = _seated(plan, slots)
    if not (best.plan.fits or gpu.processor):
        tried = [_seated(replan(plan, keys), slots) for keys in _changes(plan, _switches(config), tokens)]
        best = _fitting(tried, slots, main_memory)
    return best.plan.run.config, _line(plain, plan, best, slots=slots)


def _switches(config: Config) -> list[str]:
    return [key for key in OPEN if getattr(config.train, key.rpartition(".")[2]) is None]


def _open_slots(config: Config) -> bool:
    """Whether an embedded engine generates, and the config leaves its slots open."""
    if config.rollout.rollout_slots or config.rollout.debug_train_only or not engine_of(config).embedded:
        return False
    return not all(stage.train.offline for stage in stages(config))


def _seated(plan: MemoryPlan, slots: bool) -> Advice:
    """The plan with no more slots than the engine's cache holds growing sequences; its text says why so many.

    A sequence too many is taken off and computes its tokens again, which costs less than a slot too few. So of several
    stages the one counts in which the cache holds most.
    """
    wish = plan.run.config.rollout.rollout_slots
    text = "as on any processor" if plan.run.gpu.processor else f"a step's samples, {LEAST_SLOTS} to {MOST_SLOTS:,}"
    lengths = [(stage.engine, stage.subject) for stage in plan.stages if not stage.subject.config.train.offline]
    counts = [int(engine.positions / one.lengths.growing) for engine, one in lengths if engine is not None]
    if not slots or max(counts, default=wish) >= wish:
        return Advice(text=text, keys={}, plan=plan)
    keys = {SLOTS_KEY: max(1, *counts)}
    return Advice(text="the cache holds no more", keys=keys, plan=replan(plan, keys))


def _changes(plan: MemoryPlan, names: list[str], tokens: bool) -> Iterator[dict[str, Any]]:
    """All combinations, those that need least memory last: micro-batches, layers that recompute, state that waits."""
    sizes = [0]
    if tokens and plan.trainer is not None:
        halvings = int(math.log2(max(1, plan.trainer.tokens // FEW_TOKENS)))
        sizes += [plan.trainer.tokens >> count for count in range(1, halvings + 1)]
    usable = [name for name in names if allowed(plan.run.config, {name: True})]
    for switch in subsets(usable):
        for size in sizes:
            yield dict.fromkeys(switch, True) | ({TOKENS_KEY: size} if size else {})


def _fitting(tried: list[Advice], slots: bool, main_memory: int) -> Advice:
    """The fastest step that fits, with fewer slots where these are open; the smallest settings where none does.

    What waits in main memory counts where that is known: first come those that it has room for.
    """
    if slots:
        tried = [_fewer(one) for one in tried]
    fitting = [one for one in tried if one.plan.fits]
    if main_memory:
        fitting = [one for one in fitting if _waiting(one.plan) < main_memory] or fitting
    return min(fitting, key=cost) if fitting else tried[-1]


def _waiting(plan: MemoryPlan) -> int:
    """Bytes that the ranks of a machine keep in main memory while they train."""
    trainer = plan.trainer
    nbytes = sum(size for name, size in trainer.host.items() if name != "loading") if trainer is not None else 0
    return nbytes * plan.run.config.cluster.actor_num_nodes * plan.run.config.cluster.actor_num_gpus_per_node


def _fewer(one: Advice) -> Advice:
    """With as many slots as fit, or with the fewest."""
    if one.plan.fits:
        return one
    slots = one.plan.run.config.rollout.rollout_slots
    keys = {SLOTS_KEY: min(slots, largest_slots(one.plan) or FEWEST)}
    return Advice(text="more do not fit", keys=keys, plan=replan(one.plan, keys))


def _line(plain: Config, first: MemoryPlan, best: Advice, *, slots: bool) -> str:
    plan, words = best.plan, []
    config, gpu = plan.run.config, plan.run.gpu
    if plan.trainer is not None and not gpu.processor:
        words.append(f"micro-batches of {plan.trainer.tokens} tokens")
    words += [f"{key.rpartition('.')[2]} = true" for key in OPEN if _value(config, key) and not _value(plain, key)]
    if slots:
        count = config.rollout.rollout_slots
        words.append(f"{count} sequence{'s' * (count > 1)} at once ({best.text})")
    if not words:
        return ""
    peak = max((device.peak for device in plan.devices), key=lambda moment: moment.total)
    text = f"auto: {', '.join(words)}: {peak.total / GIB:.1f} of {gpu.room / GIB:.1f} GiB at most ({peak.phase})"
    changed = {key for key in (*OPEN, TOKENS_KEY) if _value(config, key) != _value(plain, key)}
    if changed:
        text += f"; without, {first.short / GIB:.1f} GiB would be missing"
    return text if plan.fits else f"{text}; the plan says that {plan.short / GIB:.1f} GiB are missing all the same"


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
