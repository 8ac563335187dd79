"""What travels between the plugin's rooms: a problem, a verdict on one candidate, and a turn of a dialogue.

    problems -> Problem -> dialogue (prompt, answer, source) -> judge -> Verdict -> reward, feedback -> Turn -> records

Standard library only; nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

Status = Literal[
    "correct",  # every case agrees with the reference
    "wrong",  # it ran, and an output disagrees: values, shape, dtype, NaN
    "rejected",  # the static policy refuses it; nothing was run
    "compile_error",  # does not parse, import, or compile for the target
    "runtime_error",  # raised, or its process died
    "timeout",  # did not end in time, at whichever stage
    "hack",  # a run-time layer caught it cheating
    "infra",  # nothing could be judged: the sample is masked, never scored
]
Stage = Literal["static", "import", "compile", "correctness", "speed"]


@dataclass(slots=True, frozen=True, kw_only=True)
class KernelProblem:
    """A reference in PyTorch that a kernel is to replace: KernelBench's format.

    ``source`` defines ``class Model(nn.Module)``, ``get_inputs() -> list``, ``get_init_inputs() -> list``; sizes are
    module-level constants. It is code from a data set, so it runs in the sandbox alone.

    Example:
        Problem(id="kernelbench/1/19", name="ReLU", level=1, source="import torch ...")
    """

    id: str  # [A-Za-z0-9._/-], unique in a data set
    name: str
    source: str
    level: int = 1
    where: str = ""  # "file:line" or "dataset[row]", for messages
    occasion: str = ""  # inputs are drawn anew for each: a version of the weights and a turn, such as "12.1"


@dataclass(slots=True, frozen=True, kw_only=True)
class Diagnostic:
    """What a candidate's author may be told of a failure. Never holds expected values, inputs or seeds."""

    stage: Stage
    kind: str  # "SyntaxError", "CompilationError", "shape", "values", "mutated_input", ...
    message: str  # one line
    line: int | None = None  # in the candidate's source, from 1
    excerpt: str = ""  # of the candidate's source around that line
    traceback: str = ""  # frames of the candidate's source alone


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """One comparison: a set of shapes under one regime of input values."""

    shapes: str  # such as "64x128"
    regime: str  # "normal", "negative", "large", "sparse", ...
    agrees: bool
    max_abs: float = 0.0  # largest |candidate - reference|
    max_rel: float = 0.0  # the same over the tolerance's scale
    tolerance: float = 0.0
    where: tuple[int, ...] = ()  # index of the largest difference


@dataclass(slots=True, frozen=True, kw_only=True)
class Timing:
    """Milliseconds on the device named; medians over repeats, and the half width of a 95 % interval."""

    device: str
    candidate: float
    candidate_ci: float
    eager: float  # the reference, live, on the same device
    compiled: float | None  # the reference under torch.compile; None where it does not compile
    floor: float  # below this it cannot be: bytes and FLOPs over the device's peaks
    repeats: int
    remeasured: float  # median of the second measurement, in a fresh process
    host_over_event: float  # host clock over device events; far from 1 means hidden work

    @property
    def slower(self) -> float:
        """Of the two measurements: the time that speed-ups are told over."""
        return max(self.candidate, self.remeasured)

    @property
    def speedup(self) -> float:
        """Of the faster baseline over the slower of the two measurements."""
        baseline = self.eager if self.compiled is None else min(self.eager, self.compiled)
        return baseline / self.slower


@dataclass(slots=True, frozen=True, kw_only=True)
class Flag:
    """Evidence of a cheat."""

    rule: str  # such as "torch_computes", "decoy_launch"
    layer: Literal["static", "launch", "ablation", "process", "timing"]
    detail: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """What the judge says about one candidate, made outside of the process that ran it.

    Example:
        Verdict(status="correct", reached="correctness", cases=(Case(shapes="64", regime="normal", agrees=True),))
    """

    status: Status
    reached: Stage  # the last stage that began
    diagnostics: tuple[Diagnostic, ...] = ()
    cases: tuple[Case, ...] = ()
    timing: Timing | None = None
    flags: tuple[Flag, ...] = ()
    notes: tuple[str, ...] = ()  # what else was seen, which decides nothing
    launches: int = 0  # of the candidate's kernels, counted while its output was made
    sandbox: str = ""  # level reached, such as "strong"
    layers: tuple[str, ...] = ()  # such as ("userns", "netns", "seccomp", "landlock", "rlimits")
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    source_hash: str = ""  # sha256 of the candidate's source, as sampled
    cached: bool = False  # judged before, in this run

    @property
    def compiled(self) -> bool:
        """Whether it was imported, and compiled where that is asked."""
        return self.status in ("correct", "wrong", "runtime_error") or (
            self.status in ("timeout", "hack") and self.reached in ("correctness", "speed")
        )

    @property
    def correct(self) -> bool:
        """Whether it is a right answer, honestly got."""
        return self.status == "correct"


class Judge(Protocol):
    """Judges candidates: in this process (`judge.LocalJudge`), or over HTTP (`service.client.RemoteJudge`)."""

    async def judge(self, source: str, problem: KernelProblem) -> Verdict:
        """The verdict on one candidate; infrastructure trouble is a verdict too (``infra``), never an exception."""
        ...

    async def aclose(self) -> None:
        """End every process of its."""
        ...
