"""What parts of a run tell a plan: bytes by component at the moments of each phase, and how work is divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.planning.gpus import Gpu
    from slime_core.planning.sizes import ModelSizes

Phase = Literal["rollout", "score", "train", "update", "sync"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "train", "update", "sync")
Bytes = Mapping[str, int]
"""Component -> bytes."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts and responses: measured, assumed, or the most that the config allows."""

    prompt: float
    response: float
    longest: int  # prompt and response of the longest sequence
    p95: float
    source: str  # what says so
    assumed: bool = False  # responses are as long as they may be, which most are not

    @property
    def mean(self) -> float:
        """Of a whole sequence."""
        return self.prompt + self.response

    @property
    def growing(self) -> float:
        """Of a sequence that is being generated, on average: half grown, of assumed responses a quarter."""
        return self.prompt + self.response / (4 if self.assumed else 2)


@dataclass(slots=True, frozen=True, kw_only=True)
class Subject:
    """What is planned: one stage of a run on GPUs of one kind; ``train.dtype`` is settled."""

    config: Config
    sizes: ModelSizes
    gpu: Gpu
    lengths: Lengths
    needs: frozenset[str] = frozenset()  # roles that the stage's loss and estimator read
    teacher: ModelSizes | None = None  # of distillation, where the trainer or an embedded engine has one
    apart: bool = False  # embedded engines have processes and GPUs of their own: a stage runs or evaluates ahead
    earlier: int = 0  # bytes of the cache that an engine keeps from the stage before

    @property
    def half(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.config.train.dtype != "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.half else 4

    @property
    def ranks(self) -> int:
        """Trainer ranks."""
        return self.config.cluster.actor_num_nodes * self.config.cluster.actor_num_gpus_per_node


@dataclass(slots=True, frozen=True)
class Moment:
    """Bytes on one GPU by component, at one time of a phase."""

    phase: Phase
    bytes: Bytes

    @property
    def total(self) -> int:
        """Of all components."""
        return sum(self.bytes.values())

    def with_(self, more: Bytes) -> Moment:
        """The same with components of others on that GPU."""
        return Moment(self.phase, {**self.bytes, **{name: size for name, size in more.items() if size}})


def peaks(moments: Iterable[Moment]) -> dict[Phase, Moment]:
    """The largest moment of each phase, in the phases' order."""
    by_phase: dict[Phase, Moment] = {}
    for moment in moments:
        before = by_phase.get(moment.phase)
        if before is None or moment.total > before.total:
            by_phase[moment.phase] = moment
    return {phase: by_phase[phase] for phase in PHASES if phase in by_phase}


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerFootprint:
    """What a trainer has on its fullest GPU, and how it divides a batch."""

    moments: tuple[Moment, ...]
    resident: Bytes  # while an engine generates for the first time: no moments, no gradients
    tokens: int  # of a micro-batch on one GPU
    data: int = 1  # data-parallel ranks
    sequence: int = 1  # GPUs that share a sequence
    pipeline: int = 1
    layout: Mapping[str, int] = field(default_factory=dict)  # by name, those above 1
    recomputed: float = 0.0  # part of the forward pass that is computed once more
    host: Bytes = field(default_factory=dict)  # in main memory, of a GPU's rank
    moved: int = 0  # bytes that go to main memory and back in an optimizer step
    publish: int = 0  # bytes that a weight update has
    launch: float = 4.5e-4  # seconds a layer and micro-batch, both passes, where kernels are too small to hide it
    live: bool = False  # an engine in its process reads its storage
    exact: bool = True  # activations were counted, not estimated
    notices: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class DecodeCosts:
    """How an engine's decode steps miss the roofline."""

    fixed: float  # seconds a step
    layer: float  # seconds a layer: launches, or their replay
    sequence: float  # seconds a sequence of a step: what the host does for it
    request: float  # seconds a sample, from its request to its answer, beside its tokens
    weights: float  # share of bandwidth
    cache: float  # the same of keys and values
    products: float  # share of peak


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineFootprint:
    """What an engine has on each of its GPUs by phase, and how much it decodes at once."""

    bytes: Mapping[Phase, Bytes]
    sequences: int  # at once, of one engine, as long as the longest
    positions: int  # of keys and values that one engine holds
    position_bytes: int  # of one engine's GPUs together
    engines: int = 1
    gpus: int = 1  # of an engine
    shared: bool = True  # they are the trainer's
    slots: int = 0  # sequences at once that the config asks for; 0 is as many as there are
    costs: DecodeCosts | None = None  # None: the embedded engine's
    staging: bool = False  # updates pass through a buffer of all weights on the trainer's GPU
    gives_memory: bool = False  # to the trainer while it trains, which then waits in main memory meanwhile
    notices: tuple[str, ...] = ()
