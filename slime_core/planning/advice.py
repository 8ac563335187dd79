"""What to set: the largest settings that fit, what makes a run fit that does not, and a split of GPUs.

Each answer is a plan that was computed with the changed keys, so it holds by the same arithmetic as the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from slime_core.config.rules import conflicts
from slime_core.config.stages import LEAST_SLOTS, MOST_SLOTS, stages
from slime_core.planning.memory import MemoryPlan, replan, with_keys
from slime_core.planning.time import TimePlan
from slime_core.plugins.backends import engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Keys = Mapping[str, Any]
"""Dotted key -> value: ``{"train.max_tokens_per_gpu": 8192}``."""
STEP, MOST = 1024, 131072  # tokens of a micro-batch that are tried
TOKENS = (16384, 8192, 4096, 2048, 1024)
RANK = 32  # of adapters that are suggested
NODE = (2, 4, 8)  # GPUs of a machine that are suggested
SLOTS = (512, 256, 128, 64, 32, 16, 8)


@dataclass(slots=True, frozen=True, kw_only=True)
class Advice:
    """One answer."""

    text: str
    keys: Keys
    plan: MemoryPlan

    @property
    def flags(self) -> str:
        """The keys as flags of a command line."""
        return " ".join(_flag(key, value) for key, value in self.keys.items())


@dataclass(slots=True, frozen=True, kw_only=True)
class GpuSplit:
    """GPUs of the trainer and of the engine, and seconds of a step; ``engine`` 0: both share all."""

    trainer: int
    engine: int
    seconds: float
    waits: str  # which side is idle, and for which share of a step


def _flag(key: str, value: Any) -> str:
    name = key.rpartition(".")[2].replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def allowed(config: Config, keys: Keys) -> bool:
    """Whether other values hold together with the rest: Megatron and paged moments have offloading of their own."""
    return len(conflicts(stages(with_keys(config, keys))[-1])) <= len(conflicts(stages(config)[-1]))


def largest_tokens(plan: MemoryPlan) -> int:
    """The largest ``max_tokens_per_gpu`` that fits, in steps of 1,024 tokens; 0 where none does."""
    most = int(min(MOST, max(STEP, plan.subject.lengths.mean * _samples(plan))))
    low, high = 0, -(-most // STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if replan(plan, {"train.max_tokens_per_gpu": middle * STEP}).fits:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def largest_slots(plan: MemoryPlan) -> int:
    """The most ``rollout_slots`` with which all fits, at most as many as a step has samples; 0 where none do."""
    low, high = 0, min(MOST_SLOTS, max(LEAST_SLOTS, _samples(plan)))
    while low < high:
        middle = (low + high + 1) // 2
        if replan(plan, {"rollout.rollout_slots": middle}).fits:
            low = middle
        else:
            high = middle - 1
    return low


def _samples(plan: MemoryPlan) -> int:
    rollout = plan.subject.config.rollout
    return rollout.rollout_batch_size * rollout.n_samples_per_prompt


def remedies(plan: MemoryPlan) -> Iterator[Keys]:
    """Changes that need less memory, by parts of them: recomputed layers and offloads, micro-batches, sequences."""
    config, longest = plan.subject.config, plan.subject.lengths.longest
    names = ("gradient_checkpointing", "activation_offload", "fsdp_cpu_offload") if plan.trainer is not None else ()
    open_keys = [f"train.{name}" for name in names if not getattr(config.train, name)]
    switches = [keys for chosen in subsets(open_keys) if allowed(config, keys := dict.fromkeys(chosen, True))]
    tokens = plan.trainer.tokens if plan.trainer is not None else 0
    sizes = [tokens, *(size for size in TOKENS if longest <= size < tokens)]
    for switch in switches:
        for size in sizes:
            yield switch | ({"train.max_tokens_per_gpu": size} if size != tokens else {})


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of the names: none first, all last."""
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def fewer_slots(plan: MemoryPlan, keys: Keys) -> Keys | None:
    """The keys, with as many sequences at once as then fit; None where none do."""
    engine = plan.fullest.engine
    shares = engine is not None and engine_of(plan.subject.config).embedded and engine.shared
    slots = engine.slots if engine is not None and shares else 0
    for count in (0, *(count for count in SLOTS if count < slots)):
        candidate = {**keys, "rollout.rollout_slots": count} if count else keys
        if replan(plan, candidate).fits:
            return candidate
    return None


def to_fit(plan: MemoryPlan) -> Advice | None:
    """Keys with which a plan fits that does not, those of the fastest step; None where it fits, or nothing helps."""
    if plan.fits:
        return None
    candidates = [keys for change in remedies(plan) if (keys := fewer_slots(plan, change)) is not None]
    answers = [Advice(text="fits with", keys=keys, plan=replan(plan, keys)) for keys in candidates]
    return min(answers, key=cost) if answers else None


def beyond(plan: MemoryPlan) -> list[Advice]:
    """What fits where no setting does: adapters, on a base in 4 bits if need be; and more GPUs, the fewest of them."""
    config, cluster = plan.run.config, plan.run.config.cluster
    adapters: list[dict[str, Any]] = [{} if config.train.lora_rank else {"train.lora_rank": RANK}]
    sync = {} if plan.subject.sizes.by_kind().get("experts") else {"train.lora_sync": "adapter"}  # theirs are merged
    adapters.append(adapters[0] | {"train.base_weights": "nf4"} | sync)
    ranks = NODE[-1] if plan.run.gpu.processor else cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    more = [{"cluster.actor_num_gpus_per_node": count} for count in NODE if count > ranks]
    return [answer for keys in (adapters, more) if (answer := _first_that_fits(plan, keys)) is not None]


def _first_that_fits(plan: MemoryPlan, candidates: Sequence[Keys]) -> Advice | None:
    tried = (_made_to_fit(plan, keys) for keys in candidates if keys and allowed(plan.run.config, keys))
    return next(filter(None, tried), None)


def _made_to_fit(plan: MemoryPlan, keys: Keys) -> Advice | None:
    other = replan(plan, keys)
    if other.fits:
        return Advice(text="fits with", keys=keys, plan=other)
    answer = to_fit(other)
    return replace(answer, keys={**keys, **answer.keys}) if answer is not None else None


def cost(answer: Advice) -> tuple[float, int]:
    """Seconds of a step to a hundredth of them, then the number of keys; the keys alone where no rates are known."""
    time = TimePlan.of(answer.plan)
    return (float(f"{time.total:.2g}") if time is not None else 0.0, len(answer.keys))


def advice(plan: MemoryPlan) -> list[Advice]:
    """What a plan suggests: to fit, or how much larger settings may be and whether recomputing pays."""
    if not plan.fits:
        remedy = to_fit(plan)
        return [remedy] if remedy is not None else []
    if plan.trainer is None or plan.subject.gpu.processor:
        return []
    answers = []
    tokens = largest_tokens(plan)
    if tokens > plan.trainer.tokens:
        keys = {"train.max_tokens_per_gpu": tokens}
        answers.append(Advice(text="the largest micro-batch that fits", keys=keys, plan=replan(plan, keys)))
    recomputing = {"train.gradient_checkpointing": not plan.subject.config.train.gradient_checkpointing}
    other = replan(plan, recomputing)
    now, then = TimePlan.of(plan), TimePlan.of(other)
    if other.fits and now is not None and then is not None and then.total < 0.97 * now.total:
        text = "recomputing is not needed" if not recomputing["train.gradient_checkpointing"] else "recomputing pays"
        answers.append(Advice(text=text, keys=recomputing, plan=other))
    return answers


def splits(plan: MemoryPlan, gpus: int) -> list[GpuSplit]:
    """Ways to divide ``gpus`` of one kind, the fastest first: shared, or some that train and others that generate.

    Apart, the engine runs a step ahead (``max_staleness`` of at least 1), so a step takes the longer side's seconds.
    """
    config = plan.subject.config
    if plan.trainer is None or plan.engine is None or gpus < 2 or plan.subject.gpu.processor:
        return []
    shared = _timed(plan, {"cluster.colocate": True, "rollout.rollout_num_gpus": 0, "rollout.max_staleness": 0}, gpus)
    answers = [GpuSplit(trainer=gpus, engine=0, seconds=shared.total, waits="")] if shared is not None else []
    size, ahead = plan.engine.gpus, max(1, config.rollout.max_staleness)
    for engine in range(size, gpus, size):
        keys = {"cluster.colocate": False, "rollout.max_staleness": ahead, "rollout.rollout_num_gpus": engine}
        keys |= {"rollout.rollout_num_engines": engine // size}
        time = _timed(plan, keys, gpus - engine)
        if time is None:
            continue
        rollout = time.seconds.get("rollout", 0.0)
        trainer = sum(time.seconds.values()) - rollout
        idle, share = (
            ("trainer", 1 - trainer / time.total) if rollout > trainer else ("engine", 1 - rollout / time.total)
        )
        answers.append(
            GpuSplit(
                trainer=gpus - engine,
                engine=engine,
                seconds=max(rollout, trainer),
                waits=f"the {idle} waits {share:.0%} of a step",
            )
        )
    return sorted(answers, key=lambda split: split.seconds)


def _timed(plan: MemoryPlan, keys: Keys, ranks: int) -> TimePlan | None:
    """Seconds with so many trainer ranks; None where it does not fit, or the ranks do not divide."""
    train, table = plan.subject.config.train, plan.subject.config.table("megatron")
    group = train.context_parallel_size * train.tensor_parallel_size
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        group *= int(table.get(name, 1))
    if ranks % group:
        return None
    other = replan(plan, {**keys, "cluster.actor_num_nodes": 1, "cluster.actor_num_gpus_per_node": ranks})
    return TimePlan.of(other) if other.fits else None
