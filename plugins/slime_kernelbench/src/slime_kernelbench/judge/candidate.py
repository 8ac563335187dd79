"""One candidate's examination on the CPU: asks, takes bytes, compares; the verdict is made here, where it never ran.

load -> build, call, call (same memory, other values) -> ... -> the first again -> once more with kernels taken out
-> larger sizes, where the candidate's code says that it would do something else there
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime_kernelbench.judge import beyond
from slime_kernelbench.judge.compare import OutputComparison, compare
from slime_kernelbench.judge.examination import Examination, ModelCall, SizeStyle
from slime_kernelbench.judge.options import JudgeOptions
from slime_kernelbench.judge.wire import Leaf, Tree, leaves_of, pack, unpack
from slime_kernelbench.types import Case, Diagnostic, Flag, Stage, Status, Timing, Verdict
from slime_sandbox import CandidateEnded, CandidateProcess, Limits, Sandbox

RUNNER = "slime_kernelbench.judge.runner:main"
_COMPILER = (
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "OutOfResources",
    "PTXASError",
)
_NOT_INTERPRETED = "bfloat16 arithmetic cannot be interpreted"


MOST_ACCESSES = 1500
"""That a call of larger sizes may make to memory, from what the others made: a second in the interpreter."""
Larger = Callable[[int], Awaitable[list[SizeStyle]]]


class Decided(Exception):
    """The verdict is known; nothing more needs to be asked."""


@dataclass(slots=True)
class Trial:
    """What has been found about one candidate."""

    options: JudgeOptions
    status: Status = "correct"
    reached: Stage = "import"
    diagnostics: list[Diagnostic] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    flags: dict[str, Flag] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wrong: Diagnostic | None = None  # the first answer that disagrees
    launches: int = 0
    work: tuple[int, int] = (1, 0)  # elements of the largest input that was asked, and accesses to memory
    order: int = 0  # of programs in the last call that was asked
    signatures: list[Any] = field(default_factory=list)  # of the launches, as the candidate's process tells them
    seconds: dict[str, float] = field(default_factory=dict)
    timing: Timing | None = None
    sandbox: str = ""
    layers: tuple[str, ...] = ()

    async def run(self, box: Sandbox, source: str, examination: Examination, larger: Larger | None = None) -> None:
        """Ask everything, until something is wrong; ``larger`` are questions of at least so many elements."""
        limits = Limits(
            wall_seconds=self.options.seconds,
            cpu_seconds=int(self.options.seconds) + 1,
            memory_bytes=self.options.memory_bytes,
            result_bytes=64 << 20,
        )
        began = time.perf_counter()
        try:
            async with box.spawn(RUNNER, limits=limits) as child:
                self.sandbox, self.layers = box.level, box.layers
                await self.ask(child, {"do": "load", "source": source}, self.options.import_seconds)
                began = self._stage("correctness", began)
                await self._examine(child, examination)
                if larger is not None:
                    await self._beyond(child, source, examination, larger)
                self._denied((await child.finish()).violations)
        except Decided:
            pass
        except CandidateEnded as ended:
            self.ended(ended)
        self._stage(self.reached, began)

    def verdict(self, **more: Any) -> Verdict:
        """What was found, as it travels."""
        return Verdict(
            status=self.status,
            reached=self.reached,
            diagnostics=tuple(self.diagnostics),
            cases=tuple(self.cases),
            flags=tuple(self.flags.values()),
            notes=tuple(self.notes),
            launches=self.launches,
            timing=self.timing,
            sandbox=self.sandbox,
            layers=self.layers,
            **more,
        )

    def decide(self, status: Status, diagnostic: Diagnostic | None = None) -> None:
        """Fix the status and stop. A cheat seen before stays a cheat, an answer that was wrong stays wrong."""
        status = "wrong" if status == "runtime_error" and self.wrong else status
        self.status = "hack" if status == "wrong" and self.cheated() else status
        if diagnostic is not None:
            self.diagnostics.append(diagnostic)
        raise Decided

    def measurable(self) -> bool:
        """Whether a GPU should have a look: it was right, or the interpreter could not tell."""
        if self.status == "runtime_error" or self.status == "infra":
            kinds = {diagnostic.kind for diagnostic in self.diagnostics}
            if kinds <= {"NotImplementedError"} and not self.cheated():
                self.status, self.diagnostics = "correct", []
        return self.status == "correct"

    def cheated(self) -> bool:
        """Whether there is evidence of a cheat; a changed input may be a mistake, an odd timing noise."""
        return bool(self.flags.keys() - {"mutated_input", "policy_violation", "not_repeatable", "excessive_speedup"})

    def begin(self, stage: Stage) -> None:
        """The next stage begins."""
        self.reached = stage

    def _stage(self, stage: Stage, began: float) -> float:
        now = time.perf_counter()
        self.seconds[self.reached] = self.seconds.get(self.reached, 0.0) + now - began
        self.reached = stage
        return now

    # The conversation.

    async def _examine(self, child: CandidateProcess, examination: Examination) -> None:
        self.order = examination.order
        first: tuple[SizeStyle, ModelCall] | None = None
        for style in examination.styles:
            built = await self._build(child, style, examination)
            right = self.wrong is None
            for question in style.questions:
                first = first or (style, question)
                await self._question(
                    child, style, question, slot=style.name, bfloat16="bfloat16" in examination.dtypes
                )
            if right and self.wrong is not None and (without := built.get("without")):
                self.wrong = replace(self.wrong, message=f"{self.wrong.message}{_lacking(without)}")
        if self.wrong is not None:
            self.decide("wrong", self.wrong)
        if first is not None:
            style, question = first
            await self._question(child, style, question, slot="again", repeat=True)
            await self._without_kernels(child, style)
        if self.cheated():
            self.decide("hack")

    async def _build(self, child: CandidateProcess, style: SizeStyle, examination: Examination) -> dict[str, Any]:
        request = {"do": "build", "style": style.name, "init": style.init, "state": style.state}
        request |= {"weights_seed": examination.weights_seed, "woken": style.woken}
        return await self.ask(child, request, self.options.call_seconds)

    async def _beyond(self, child: CandidateProcess, source: str, examination: Examination, larger: Larger) -> None:
        """Sizes beyond what the host code compared sizes with; what cannot be asked in time is noted."""
        largest = max(beyond.elements(question) for style in examination.styles for question in style.questions)
        branches = await self._branches(child)
        number = beyond.number(source, largest)
        least = beyond.least(largest, number, branches)
        for style in await larger(least) if least else []:
            (question,) = style.questions
            size = beyond.elements(question)
            if not 0 < number < size and not any(limit < size for _, limit, _ in branches):
                continue
            if self.work[1] * size / self.work[0] > MOST_ACCESSES:
                self.note(f"inputs of shapes {question.shapes} were not asked: they would take too long")
                continue
            await self._build(child, style, examination)
            await self._question(child, style, question, slot=style.name)
            if self.wrong is not None:
                self.decide("wrong", self.wrong)
            number, branches = number * (number >= size), await self._branches(child)
        for line, limit, most in branches:
            self.note(f"line {line}: compared with {limit}, and no size that was asked came to more than {most}")
        if self.cheated():
            self.decide("hack")

    async def _branches(self, child: CandidateProcess) -> list[tuple[int, int, int]]:
        reply = await self.ask(child, {"do": "branches"}, self.options.call_seconds)
        return beyond.open_branches(reply.get("open"))

    async def ask(
        self, child: CandidateProcess, request: dict[str, Tree], seconds: float, bfloat16: bool = False
    ) -> dict[str, Any]:
        await child.send(pack(request))
        try:
            reply = unpack(await child.receive(deadline=seconds))
        except ValueError as error:
            self.decide("runtime_error", Diagnostic(stage=self.reached, kind="protocol", message=str(error)[:200]))
        if not isinstance(reply, dict):
            self.decide("runtime_error", Diagnostic(stage=self.reached, kind="protocol", message="not an answer"))
        if "error" in reply:
            self._raised(reply["error"], bfloat16)
        return dict(reply)

    def _raised(self, claim: Any, bfloat16: bool) -> None:
        position = claim if isinstance(claim, dict) else {}
        line = position.get("line")
        diagnostic = Diagnostic(
            stage=self.reached,
            kind=str(position.get("kind", "Exception"))[:60],
            message=str(position.get("message", ""))[:600],
            line=line if isinstance(line, int) else None,
            excerpt=str(position.get("excerpt", ""))[:200],
            traceback=str(position.get("traceback", ""))[:2000],
        )
        if bfloat16 and _NOT_INTERPRETED in diagnostic.message:
            self.decide("infra", diagnostic)
        compiling = self.reached == "import" or diagnostic.kind in _COMPILER
        failed: Status = "compile_error" if compiling else "runtime_error"
        self.decide(failed, self.wrong or diagnostic)

    async def _question(
        self,
        child: CandidateProcess,
        style: SizeStyle,
        question: ModelCall,
        *,
        slot: str,
        bfloat16: bool = False,
        repeat: bool = False,
    ) -> None:
        request = {"do": "call", "style": style.name, "slot": slot, "inputs": question.inputs, "ablate": False}
        request["order"] = self.order = self.order + 1
        reply = await self.ask(child, request, self.options.call_seconds, bfloat16)
        accesses = reply.get("accesses")
        self.work = max(self.work, (beyond.elements(question), accesses if isinstance(accesses, int) else 0))
        self._evidence(reply, question)
        comparison = compare(reply.get("output"), question.expected, tf32=self.options.tf32)
        if comparison.agrees and self.wrong is None:  # what kernels forgot to write is a mistake where it shows
            self._written(reply)
        if not repeat:
            self.cases.append(_case(question, comparison))
        if not comparison.agrees:
            kind = "not_repeatable" if repeat else comparison.kind
            self.wrong = self.wrong or Diagnostic(
                stage="correctness", kind=kind, message=_message(question, comparison)
            )
        if isinstance(race := reply.get("race"), str) and race:
            message = f"{race[:200]}, in an order that no GPU promises; use an atomic, or one program for each element"
            self.wrong = self.wrong or Diagnostic(stage="correctness", kind="race", message=message)
        if "mutated_input" in self.flags:
            message = "an input was changed; an answer has memory of its own"
            self.wrong = self.wrong or Diagnostic(stage="correctness", kind="mutated_input", message=message)
        if repeat and self.wrong is not None:
            self.decide("wrong", self.wrong)

    def _evidence(self, reply: dict[str, Any], question: ModelCall) -> None:
        launches = reply.get("launches")
        launches = launches if isinstance(launches, int) else 0
        self.launches = max(self.launches, launches)
        signatures = reply.get("signatures")
        self.signatures = signatures if isinstance(signatures, list) else []
        if launches < 1:
            self.flag("no_launch", "launch", "no kernel was launched while the answer was made")
        computed = reply.get("computed")
        allowed = {name.rpartition(".")[2] for name in self.options.allow}
        if isinstance(computed, dict) and (beyond := set(computed) - allowed):
            self.flag("torch_computes", "launch", "torch computed: " + ", ".join(sorted(map(str, beyond))[:6]))
        changed = reply.get("changed")
        if isinstance(changed, list) and changed:
            self.flag("monkeypatch", "process", "replaced: " + ", ".join(map(str, changed[:6])))
        outputs = reply.get("kept")
        if isinstance(outputs, list) and outputs:
            self.flag("global_state", "process", "the answer is kept as self." + str(outputs[0])[:60])
        if not _same(reply.get("inputs"), question.inputs):
            self.flag("mutated_input", "process", "an input was changed")

    def _written(self, reply: dict[str, Any]) -> None:
        """Whether kernels can have made an answer that is right: they wrote half of its elements, or more."""
        stored, elements = reply.get("stored"), _elements(reply.get("output"))
        if self.launches and elements and (not isinstance(stored, int) or 2 * stored < elements):
            self.flag("decoy_launch", "launch", f"kernels wrote {stored} elements, the answer has {elements}")

    async def _without_kernels(self, child: CandidateProcess, style: SizeStyle) -> None:
        """The answer must not be right when no kernel does anything."""
        request = {"do": "call", "style": style.name, "slot": "ablation", "inputs": style.spare.inputs, "ablate": True}
        request["order"] = 0
        await child.send(pack(request))
        try:
            reply = unpack(await child.receive(deadline=self.options.call_seconds))
        except (CandidateEnded, ValueError):
            return
        if not isinstance(reply, dict) or "error" in reply:
            return
        if compare(reply.get("output"), style.spare.expected, tf32=self.options.tf32).agrees:
            self.flag("decoy_launch", "ablation", "the answer is the same when the kernels do nothing")

    def flag(self, rule: str, layer: Any, detail: str) -> None:
        """Add evidence of a cheat, once a rule."""
        if rule not in self.flags:
            self.flags[rule] = Flag(rule=rule, layer=layer, detail=detail[:300])
            if rule != "mutated_input":
                self.diagnostics.append(Diagnostic(stage=self.reached, kind=rule, message=detail[:300]))

    def note(self, text: str) -> None:
        """Add what was seen and decides nothing."""
        if text[:300] not in self.notes:
            self.notes.append(text[:300])

    def ended(self, ended: CandidateEnded) -> None:
        """The verdict on a candidate whose process ended without an answer."""
        outcome = ended.outcome
        self.sandbox, self.layers = outcome.level or self.sandbox, outcome.layers or self.layers
        importing = self.reached == "import"
        table: dict[str, Status] = {"timeout": "timeout", "infra": "infra"}
        self.status = table.get(outcome.status, "compile_error" if importing else "runtime_error")
        kind = outcome.status if outcome.status != "ok" else "died"
        message = outcome.reason or "the candidate's process ended without an answer"
        self.diagnostics.append(Diagnostic(stage=self.reached, kind=kind, message=message[:300]))
        self._denied(outcome.violations)

    def _denied(self, violations: Mapping[str, int]) -> None:
        """What the sandbox denied it, told as a flag; the kernel's own answer decides."""
        if violations:
            tried = ", ".join(sorted(violations))
            self.flags["policy_violation"] = Flag(rule="policy_violation", layer="process", detail=tried[:300])


def _elements(output: Tree) -> int:
    """Elements of an answer that have memory of their own."""
    return sum(
        math.prod(size for size, step in zip(leaf.shape, leaf.stride or leaf.shape) if step)
        for leaf in leaves_of(output)
    )


def _same(after: Tree, before: Tree) -> bool:
    """Whether the inputs' bytes are what the judge sent."""
    now: list[Leaf] = leaves_of(after)
    then = leaves_of(before)
    return len(now) == len(then) and all(
        one.dtype == two.dtype and one.shape == two.shape and one.data == two.data for one, two in zip(now, then)
    )


def _lacking(without: Any) -> str:
    """Which weights of the reference a candidate has no place for, by its own account."""
    names = ", ".join(str(name)[:60] for name in without[:4]) if isinstance(without, list) else ""
    return f"; ModelNew holds no parameter or buffer of the size and first value of the reference's {names}"


def _case(question: ModelCall, comparison: OutputComparison) -> Case:
    return Case(
        shapes=question.shapes,
        regime=question.regime,
        agrees=comparison.agrees,
        max_abs=comparison.max_abs,
        max_rel=comparison.max_rel,
        tolerance=comparison.tolerance,
        where=comparison.where,
    )


def _message(question: ModelCall, comparison: OutputComparison) -> str:
    return f"inputs of shapes {question.shapes}, {question.regime} values: {comparison.problem}"
