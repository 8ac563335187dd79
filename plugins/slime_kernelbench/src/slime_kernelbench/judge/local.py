"""The judge in this process: sandboxes, a queue, and a memory of what was judged.

source, problem -> policy -> examination (reference's process) -> trial (candidate's process) -> Verdict
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Literal, Self

from slime_core.errors import SandboxError
from slime_kernelbench.judge import policy
from slime_kernelbench.judge.asked import Unjudgeable
from slime_kernelbench.judge.candidate import Trial
from slime_kernelbench.judge.examination import Examination, Examiner, SizeStyle
from slime_kernelbench.judge.opened import OpenedBox
from slime_kernelbench.judge.options import JudgeOptions
from slime_kernelbench.judge.speed import Speed
from slime_kernelbench.judge.target import Compiler
from slime_kernelbench.secret import Secret
from slime_kernelbench.types import Diagnostic, KernelProblem, Verdict
from slime_sandbox import Sandbox

PRELOAD = (
    "slime_kernelbench.judge.folders",
    "slime_kernelbench.judge.reference",
    "slime_kernelbench.judge.runner",
    "torch.fx.experimental.symbolic_shapes",
)
"""The last for its time: torch loads it, and sympy, in 0.5 s where a process first makes tensors without memory."""
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


class LocalJudge:
    """Judges candidates on this machine. Belongs to one event loop.

    Example:
        async with LocalJudge(JudgeOptions(workers=2)) as judge:
            verdict = await judge.judge(source, problem)
    """

    def __init__(
        self,
        options: JudgeOptions | None = None,
        *,
        secret: Secret | None = None,
        device: Literal["cuda", "cpu"] = "cuda",
    ) -> None:
        """``secret`` is what inputs are drawn from, else a new one.

        ``device`` is what the last stage measures on, where ``options.gpus`` asks for it.
        """
        self.options = options or JudgeOptions()
        self.evaluations = 0  # candidates really judged, not remembered
        self._verdicts: OrderedDict[tuple[str, str, str], asyncio.Future[Verdict]] = OrderedDict()
        self._slots = asyncio.Semaphore(self.options.workers)
        self._compiler = Compiler(self.options)
        self._speed = Speed(self.options, device) if self.options.gpus else None
        self._opened = OpenedBox(self.options, PRELOAD, environment=_ENVIRONMENT)
        self._examiner = Examiner(self._opened, secret or Secret(), self.options.sets)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every process of the judge's."""
        await self._compiler.aclose()
        if self._speed is not None:
            await self._speed.aclose()
        await self._opened.aclose()

    async def judge(self, source: str, problem: KernelProblem) -> Verdict:
        """The verdict on one candidate; one that this occasion has, or is being judged for it, is not judged again."""
        digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        about = hashlib.sha256(problem.source.encode(errors="surrogatepass")).hexdigest()
        key = (digest, about, problem.occasion)
        while (pending := self._verdicts.get(key)) is not None:
            await asyncio.wait([pending])
            if not pending.cancelled():
                return replace(pending.result(), cached=True)
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[key] = future
        try:
            verdict = replace(await self._judged(source, problem), source_hash=digest)
        except BaseException:
            del self._verdicts[key]
            future.cancel()
            raise
        future.set_result(verdict)
        if verdict.status == "infra":
            del self._verdicts[key]
        while len(self._verdicts) > self.options.cache:
            self._verdicts.popitem(last=False)
        return verdict

    async def reference_check(self, problem: KernelProblem) -> str:
        """Why this problem cannot be judged, or "" where it can."""
        try:
            await self._examiner.examination(problem)
        except (Unjudgeable, SandboxError, OSError) as error:
            return str(error)
        return ""

    async def _judged(self, source: str, problem: KernelProblem) -> Verdict:
        self.evaluations += 1
        began = time.perf_counter()
        reading = policy.read(source, frozenset(self.options.allow))
        seconds = {"static": time.perf_counter() - began}
        if reading.status != "ok":
            return Verdict(
                status=reading.status,
                reached="static",
                diagnostics=reading.diagnostics,
                flags=reading.flags,
                seconds=seconds,
            )
        try:
            box = await self._opened.box()
            async with self._slots:  # however many ask: no more processes than workers, the references' among them
                examination = await self._examiner.examination(problem, source)
                trial = await self._tried(box, reading.text or source, problem, examination)
        except (Unjudgeable, SandboxError, OSError) as error:
            diagnostic = Diagnostic(
                stage="correctness", kind=type(error).__name__, message=" ".join(str(error).split())
            )
            return Verdict(status="infra", reached="static", diagnostics=(diagnostic,), seconds=seconds)
        return trial.verdict(seconds=seconds | trial.seconds)

    async def _compiled(self, source: str, trial: Trial) -> None:
        """The stage of its own that a right answer may still fail: compiling for the target."""
        began = time.perf_counter()
        await self._compiler.check(source, trial)
        trial.seconds["compile"] = time.perf_counter() - began

    async def _tried(self, box: Sandbox, source: str, problem: KernelProblem, examination: Examination) -> Trial:
        trial = Trial(self.options)
        larger = None if self._speed is not None else partial(self._larger, problem, source)
        await trial.run(box, source, examination, larger)
        if self.options.compile and trial.status == "correct":
            await self._compiled(source, trial)
        if self._speed is not None:
            await self._timed(self._speed, source, problem, trial)
        return trial

    async def _larger(self, problem: KernelProblem, source: str, least: int) -> list[SizeStyle]:
        """None where the problem has no such sizes."""
        try:
            return await self._examiner.larger(problem, source, least)
        except Unjudgeable:
            return []

    async def _timed(self, speed: Speed, source: str, problem: KernelProblem, trial: Trial) -> None:
        """The last stage: right on the GPU too, at the problem's own sizes, and how fast."""
        before, began = trial.status, time.perf_counter()
        if not trial.measurable():
            return
        await speed.check(source, problem, trial)
        if before != "correct" and trial.reached != "speed":  # neither the interpreter nor the GPU could tell
            trial.status = "infra"
        trial.seconds["speed"] = time.perf_counter() - began
