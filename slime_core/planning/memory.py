"""Memory of each GPU of a run by component and phase, and whether it fits, with a margin.

    config, config.json, GPU --backends' footprints--> trainer's and engine's bytes by phase --placed--> each GPU

Phases: rollout (the engine generates), score (log-probs), train (forward and backward), update (the optimizer),
sync (weights go to engines). Where GPUs are shared, what one side gives back in a phase does not count there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slime_core.config.stages import rollout_slots, stages
from slime_core.errors import ConfigError
from slime_core.lora.spec import LoraSpec
from slime_core.planning.footprint import (
    PHASES,
    Bytes,
    EngineFootprint,
    Lengths,
    Moment,
    Phase,
    Subject,
    TrainerFootprint,
    peaks,
)
from slime_core.planning.gpus import GIB
from slime_core.planning.sizes import ModelSizes
from slime_core.plugins.backends import engine_of, trainer_of
from slime_core.weights.folder import resolve

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.planning.gpus import Gpu

MARGIN, ESTIMATED_MARGIN = 0.07, 0.13
"""Of the predicted bytes: what was measured beyond them; more under adapters, and of estimated activations."""
SHARED = "trainer and engine"
"""Role of a GPU."""
ASSUMED_PROMPT = 256  # tokens, where nothing says how long prompts are


@dataclass(slots=True, frozen=True, kw_only=True)
class DeviceMemory:
    """One kind of GPU of a run: the largest moment of each phase on its fullest one."""

    role: str  # "trainer and engine", "trainer", "engine"
    count: int
    phases: Mapping[Phase, Moment]
    room: int  # bytes for tensors
    margin: float

    @property
    def peak(self) -> Moment:
        """The largest moment of all phases."""
        return max(self.phases.values(), key=lambda moment: moment.total)

    @property
    def short(self) -> int:
        """Bytes that are missing, the margin included; 0 where it fits."""
        return max(0, max(map(self._needed_bytes, self.phases.values())) - self.room)

    def _needed_bytes(self, moment: Moment) -> int:
        """Bytes of a moment and its margin; a cache is one piece, made to fit."""
        return moment.total + int(self.margin * (moment.total - moment.bytes.get("KV cache", 0)))


LengthsOf = Callable[["Config", ModelSizes], Lengths]
"""Lengths of a stage, by its config."""
NeedsOf = Callable[[Any], frozenset[str]]
"""Roles that a stage's loss and estimator read, by its [train] section."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StagePlan:
    """Memory of one stage; an offline one has an engine, too, which does not generate."""

    subject: Subject
    devices: tuple[DeviceMemory, ...]
    trainer: TrainerFootprint | None
    engine: EngineFootprint | None

    @property
    def peak(self) -> Moment:
        """The largest moment of all GPUs."""
        return max((device.peak for device in self.devices), key=lambda moment: moment.total)

    @property
    def short(self) -> int:
        """Bytes that are missing on the fullest GPU, the margin included."""
        return max((device.short for device in self.devices), default=0)


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run: of each GPU the largest moment of each phase over all stages.

    Subject, trainer and engine are those of the stage that takes most.

    Example:
        plan = fits(config, ModelFolder.open(path).config, gpu_of("4090"))
        plan.fits, plan.short, plan.trainer.tokens
    """

    run: RunSubject
    stages: tuple[StagePlan, ...]

    @property
    def fullest(self) -> StagePlan:
        """The stage that takes most, of those alike the first."""
        return max(self.stages, key=lambda stage: (stage.short, stage.peak.total if stage.devices else 0))

    @property
    def subject(self) -> Subject:
        """Of the fullest stage."""
        return self.fullest.subject

    @property
    def trainer(self) -> TrainerFootprint | None:
        """Of the fullest stage; None where nothing trains, or its backend tells nothing."""
        return self.fullest.trainer

    @property
    def engine(self) -> EngineFootprint | None:
        """Of the fullest stage; None where nothing generates, or its backend tells nothing."""
        return None if self.subject.config.train.offline else self.fullest.engine

    @property
    def devices(self) -> tuple[DeviceMemory, ...]:
        """Kinds of GPUs by role, over all stages: a GPU that both share is the trainer's where nothing generates."""
        by_role: dict[str, list[DeviceMemory]] = {}
        devices = [device for stage in self.stages for device in stage.devices]
        shared = any(device.role == SHARED for device in devices)
        for device in devices:
            by_role.setdefault(SHARED if shared and device.role == "trainer" else device.role, []).append(device)
        return tuple(_merged(role, devices) for role, devices in by_role.items())

    @property
    def fits(self) -> bool:
        """Whether every GPU has room for its peak and the margin."""
        return not self.short

    @property
    def short(self) -> int:
        """Bytes that are missing on the fullest GPU, the margin included."""
        return max((stage.short for stage in self.stages), default=0)

    @property
    def notices(self) -> tuple[str, ...]:
        """What was assumed."""
        parts: list[Any] = [part for stage in self.stages for part in (stage.trainer, stage.engine)]
        texts = [text for part in parts if part is not None for text in part.notices]
        if any(stage.trainer is not None and not stage.trainer.exact for stage in self.stages):
            texts.append(f"activations of this family are an estimate: the margin is {ESTIMATED_MARGIN:.0%}")
        return tuple(dict.fromkeys(texts))


def _merged(role: str, devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """One kind of GPU over all stages."""
    moments = [moment for device in devices for moment in device.phases.values()]
    return replace(devices[0], role=role, phases=peaks(moments), margin=max(device.margin for device in devices))


@dataclass(slots=True, frozen=True, kw_only=True)
class RunSubject:
    """What is planned: a run on GPUs of one kind."""

    config: Config
    sizes: ModelSizes
    gpu: Gpu
    lengths: LengthsOf
    needs: NeedsOf
    teachers: Mapping[str, ModelSizes] = field(default_factory=dict)  # by folder

    def stages(self) -> Iterator[Subject]:
        """Each stage; all have the run's slots."""
        resolved = [with_dtype(stage, self.gpu) for stage in stages(self.config)]
        slots = rollout_slots(self.config, "cpu" if self.gpu.processor else "cuda")
        apart = any(stage.rollout.max_staleness > 0 or stage.eval.eval_async for stage in resolved)
        for stage in resolved:
            yield Subject(
                config=with_keys(stage, {"rollout.rollout_slots": slots}) if engine_of(stage).embedded else stage,
                sizes=self.sizes,
                gpu=self.gpu,
                lengths=self.lengths(stage, self.sizes),
                needs=self.needs(stage.train),
                teacher=self.teachers.get(stage.train.teacher_load),
                apart=apart,
            )


def fits(
    config: Config,
    source: Any,
    gpu: Gpu,
    *,
    lengths: Lengths | LengthsOf | None = None,
    needs: NeedsOf | None = None,
) -> MemoryPlan:
    """What a run, or one resolved stage, takes on GPUs of this kind.

    Args:
        config: its device is not looked at.
        source: the model: a folder, the table of a config.json, a config of transformers, or `ModelSizes`.
        lengths: of prompts and responses, of a stage or of all; None takes the most that the config allows.
        needs: None looks at the core's own estimators and losses.

    Raises:
        ConfigError: as the backends' layouts say, CFG04 no layer has adapters, or is what is named.
        OSError, ValueError: a config.json that cannot be read.
    """
    limit = float(getattr(config.cluster, "gpu_memory_limit", 0))
    if limit and limit * GIB < gpu.memory:
        gpu = replace(gpu, memory=int(limit * GIB))
    sizes = source if isinstance(source, ModelSizes) else ModelSizes.of(source)
    spec = LoraSpec.of(config.train)
    if spec is not None and not sizes.adapted(spec):
        raise ConfigError(
            f"no layer of {sizes.config.model_type} is a target of adapters",
            code="CFG04",
            where="train.lora_target_modules",
            why=f"targets are {', '.join((*spec.target_modules, *spec.target_parameters))}",
            fix="leave lora_target_modules out: all-linear",
        )
    if spec is not None and (unknown := sizes.unknown_names(spec)):
        raise ConfigError(
            f"no layer of {sizes.config.model_type} is {', '.join(unknown)}",
            code="CFG04",
            where="train.lora_target_modules, train.lora_exclude_modules, train.lora_target_parameters",
            why="linear layers and stacked experts are named, by ends of their names",
            fix="leave them out, or name others, such as q_proj or layers.0.mlp.up_proj",
        )
    lengths_of: LengthsOf = (lambda *_: lengths) if isinstance(lengths, Lengths) else lengths or assumed_lengths
    paths = {stage.train.teacher_load for stage in stages(config)} - {""}
    teachers = {path: ModelSizes.of(resolve(path, "train.teacher_load")) for path in paths}
    return memory_plan(
        RunSubject(config=config, sizes=sizes, gpu=gpu, lengths=lengths_of, needs=needs or roles_of, teachers=teachers)
    )


def with_dtype(config: Config, gpu: Gpu) -> Config:
    """The config with ``train.dtype`` settled for a GPU."""
    if config.train.dtype != "auto":
        return config
    dtype = "float32" if gpu.processor else "bfloat16"
    return config.model_copy(update={"train": config.train.model_copy(update={"dtype": dtype})})


def assumed_lengths(config: Config, sizes: ModelSizes) -> Lengths:
    """The longest responses that the config allows."""
    rollout = config.rollout
    context = rollout.rollout_max_context_len or int(sizes.text.max_position_embeddings or 1 << 20)
    response = min(rollout.rollout_max_response_len, context - 1)
    prompt = min(ASSUMED_PROMPT, context - response)
    return Lengths(
        prompt=prompt,
        response=response,
        longest=min(context, prompt + response),
        p95=response,
        source=f"every response as long as rollout_max_response_len allows, prompts of {prompt} tokens",
        assumed=True,
    )


def roles_of(train: Any) -> frozenset[str]:
    """Roles that the core's estimators and losses read; `Plugins.needs` knows those of plugins, too."""
    algorithm = train.algorithm
    needs: frozenset[str] = algorithm.needs if algorithm else frozenset()
    if algorithm is not None and algorithm.needs_when is not None:
        needs |= algorithm.needs_when(train)
    several = train.num_steps_per_rollout > 1 or train.global_batch_size > 0
    reads_own = not train.use_rollout_logprobs or train.use_tis or train.use_rs or train.rs_veto_threshold > 0
    roles = set[str]()
    if (several and reads_own and not train.offline) or train.kl_coef > 0 or train.opd_kl_coef > 0:
        roles.add("policy")
    if train.kl_coef > 0 or train.kl_loss_coef > 0:
        roles.add("reference")
    if train.opd_kl_coef > 0 and train.teacher_load and train.teacher_place == "trainer":
        roles.add("teacher")
    return needs | roles


def memory_plan(run: RunSubject) -> MemoryPlan:
    """See :func:`fits`."""
    plans: list[StagePlan] = []
    for subject in run.stages():
        engine = plans[-1].engine if plans else None
        cache = engine.bytes["sync"].get("KV cache", 0) if engine is not None else 0
        plans.append(_stage_plan(replace(subject, earlier=cache)))
    return MemoryPlan(run=run, stages=tuple(plans))


def _stage_plan(subject: Subject) -> StagePlan:
    config = subject.config
    trainer = engine = None
    backend, served = trainer_of(config), engine_of(config)
    if not config.rollout.debug_rollout_only and backend.memory is not None:
        trainer = backend.memory(subject)
    if not config.rollout.debug_train_only and served.memory is not None:
        engine = served.memory(subject, trainer)  # that evaluates, where a stage is offline
    exact = subject.sizes.exact and (trainer is None or trainer.exact)
    margin = MARGIN if exact and LoraSpec.of(config.train) is None else ESTIMATED_MARGIN
    devices = [
        DeviceMemory(
            role=role,
            count=count,
            phases=peaks(moments),
            room=subject.gpu.room,
            margin=margin,
        )
        for role, count, moments in _placed(subject, trainer, engine)
    ]
    return StagePlan(subject=subject, devices=tuple(devices), trainer=trainer, engine=engine)


Placed = list[tuple[str, int, list[Moment]]]


def _placed(subject: Subject, trainer: TrainerFootprint | None, engine: EngineFootprint | None) -> Placed:
    """Moments of each kind of GPU, with what sharing gives back."""
    ranks = subject.ranks
    if engine is None:
        return [("trainer", ranks, list(trainer.moments))] if trainer is not None else []
    alone: list[Moment] = [Moment(phase, engine.bytes[phase]) for phase in PHASES if engine.bytes.get(phase)]
    if trainer is None:
        return [("engine", engine.engines * engine.gpus, alone)]
    if served := _served_teacher(subject):
        trainer = replace(trainer, moments=tuple(moment.with_({"teacher": served}) for moment in trainer.moments))
    if not engine.shared:
        sent = {"weight update": trainer.publish if engine.staging else 0}
        moments = [moment.with_(sent) for moment in trainer.moments]
        return [("trainer", ranks, moments), ("engine", engine.engines * engine.gpus, alone)]
    return [(SHARED, ranks, list(_together(subject, trainer, engine)))]


def _served_teacher(subject: Subject) -> int:
    """Bytes of a teacher that scores in an embedded engine of its own, in the trainer's process."""
    train, teacher = subject.config.train, subject.teacher
    if teacher is None or train.teacher_place != "engine" or not engine_of(subject.config).embedded:
        return 0
    return subject.itemsize * (teacher.parameters + teacher.kv_position * subject.lengths.longest)


def _together(subject: Subject, trainer: TrainerFootprint, engine: EngineFootprint) -> Iterable[Moment]:
    """Both on one GPU. Servers may give memory back, and the trainer then waits in main memory: `MemorySwapping`."""
    offload_train = engine.gives_memory and subject.config.cluster.offload_train
    for moment in trainer.moments:
        state: Bytes = moment.bytes
        of_engine: Bytes = engine.bytes.get(moment.phase, {})
        if moment.phase == "rollout" and offload_train:
            state = {}
        if moment.phase == "sync":
            dropped = ("optimizer", "gradients") if offload_train else ()
            state = {name: size for name, size in state.items() if name not in dropped}
        sent = trainer.publish if engine.staging and (moment.phase == "sync" or not offload_train) else 0
        yield Moment(moment.phase, state).with_(of_engine).with_({"weight update": sent})


def swapped(subject: Subject, plan: MemoryPlan) -> int:
    """Bytes of a rank that colocation moves to main memory and back in a step."""
    engine, trainer = plan.engine, plan.trainer
    if trainer is None or engine is None or not (engine.shared and engine.gives_memory):
        return 0
    if not subject.config.cluster.offload_train:
        return 0
    state = next((moment.bytes for moment in trainer.moments if moment.phase == "rollout"), {})
    return 2 * sum(state.values())


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """The config with other values of core keys, by dotted names."""
    for key, value in keys.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def replan(plan: MemoryPlan, keys: Mapping[str, Any]) -> MemoryPlan:
    """The plan with other values of core keys."""
    return memory_plan(replace(plan.run, config=with_keys(plan.run.config, keys)))
