"""The stage that measures speed on a GPU, and judges what was measured.

    reference's process: inputs, expected values, compile -> [measure eager and compiled]  once in a while, per problem
    candidate's process, twice: load, build, compile, ready -> [the GPU is its own: measure] -> parts of timed outputs

A GPU times one candidate at a time, while others compile. Which outputs are looked at is drawn after they were made.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from slime_core.errors import SandboxError
from slime_kernelbench.judge import prepared, timing
from slime_kernelbench.judge.asked import RecentCache, Unjudgeable, require_answer
from slime_kernelbench.judge.candidate import Decided, Trial
from slime_kernelbench.judge.compare import Expected, OutputComparison, compare
from slime_kernelbench.judge.opened import OpenedBox
from slime_kernelbench.judge.options import JudgeOptions
from slime_kernelbench.judge.samples import Pattern, forms, sampled
from slime_kernelbench.judge.timing import Samples
from slime_kernelbench.judge.wire import Leaf, Tree, pack
from slime_kernelbench.types import Diagnostic, Flag, KernelProblem
from slime_sandbox import CandidateEnded, CandidateProcess, Limits, Outcome, Sandbox, compute_on

REFERENCE = "slime_kernelbench.judge.baseline:main"
CANDIDATE = "slime_kernelbench.judge.measured:main"
PREPARED = "slime_kernelbench.judge.prepared:main"
PRELOAD = ("slime_kernelbench.judge.folders", "slime_kernelbench.judge.baseline", "slime_kernelbench.judge.measured")
EVENTS, HOST, WARM, SETS = 40, 10, 4, 3
"""Calls timed by events and by the host's clock, calls before, and sets of inputs whose answers are known.

The first set is for calls that are not timed, each other one for a timed call at a place that the judge alone knows.
"""
USES = 512  # of a baseline, which takes seconds to compile, before another is drawn
HELD_BYTES = 8 << 30  # of baselines, which hold whole outputs: those that were asked for last are kept
PARTS = ("load", "build", "compile", "ready", "wait", "measure", "look")
"""Of a candidate's process: its module, its model, its kernels, memory, the wait for the GPU, its turn, answers."""
FEW_CHANNELS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""The driver makes one process's context at a time; one channel for work, not eight, takes less than half."""
_MESSAGE = 3 << 29


@dataclass(slots=True, kw_only=True)
class Baseline:
    """What the reference's process told of one problem on one GPU."""

    answer: dict[str, Any]
    seeds: list[int]  # of sets of inputs whose answers it told
    weights_seed: int
    eager: Samples
    compiled: Samples | None
    size: int  # bytes of all that was told
    uses: int = 0


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one of the candidate's processes told, and how what it made compares."""

    samples: Samples
    comparisons: list[OutputComparison]
    without: OutputComparison  # the answer that was made without kernels
    answer: dict[str, Any]
    seconds: dict[str, float]  # of its parts


class Speed:
    """Measures candidates on the GPUs of ``options``."""

    def __init__(self, options: JudgeOptions, device: Literal["cuda", "cpu"] = "cuda") -> None:
        self._options, self._device = options, device
        self._gpus = itertools.cycle(options.gpus)
        self._alone = {gpu: asyncio.Lock() for gpu in options.gpus}
        self._baselines = RecentCache[tuple[str, str], Baseline](HELD_BYTES, lambda entry: entry.size)
        self._usable = RecentCache[str, dict[str, Leaf]](len(options.gpus) or 1)
        gpu = device == "cuda"
        environment = FEW_CHANNELS | {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if gpu else {"TRITON_INTERPRET": "1"}
        self._opened = OpenedBox(options, PRELOAD, gpu=gpu, environment=environment)

    async def aclose(self) -> None:
        """End its processes."""
        await self._opened.aclose()

    async def check(self, source: str, problem: KernelProblem, trial: Trial) -> None:
        """Add a timing to ``trial``, or what was wrong on the GPU. Raises `SandboxError` where that cannot be used."""
        gpu = next(self._gpus)
        box = await self._opened.box()
        begin = await self._usable.get(gpu, partial(self._try, box, gpu))
        began = time.perf_counter()
        try:
            baseline = await self._baseline(box, problem, gpu)
            trial.seconds["speed_baseline"] = time.perf_counter() - began
        except Unjudgeable as error:
            trial.diagnostics.append(Diagnostic(stage="speed", kind="not_measured", message=str(error)[:300]))
            return
        trial.begin("speed")
        try:
            first, again = await self._twice(box, {"source": source, "prepared": begin}, baseline, gpu, trial)
            trial.seconds |= first.seconds
            self._judge(trial, baseline, first, again)
        except Decided:
            pass
        except CandidateEnded as ended:
            trial.ended(ended)

    async def _twice(
        self, box: Sandbox, begin: dict[str, Tree], baseline: Baseline, gpu: str, trial: Trial
    ) -> tuple[Measured, Measured]:
        """In two processes, of which neither knows of the other; the first failure ends both."""
        tasks = [asyncio.ensure_future(self._measured(box, begin, baseline, gpu, trial)) for _ in range(2)]
        try:
            first, again = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return first, again

    async def _try(self, box: Sandbox, gpu: str) -> dict[str, Leaf]:
        """Compute something on it, in the place where candidates do: else every one would go unmeasured.

        What Triton compiles for every candidate alike comes back, or nothing, and each compiles it for itself.
        """
        outcome = await compute_on(box, self._uuid(gpu), self._device)
        if outcome.status != "ok":
            raise SandboxError(
                f"GPU {gpu} cannot be used in the sandbox",
                code="SBX00",
                where="plugin.kernelbench.judge_gpus",
                why=outcome.reason[:500],
                fix="nvidia-smi   (that GPU and its driver)\nor without timing: --judge-gpus ''",
            )
        child = await box.run(PREPARED, gpu=self._uuid(gpu))
        try:
            return prepared.parse_answer(child.result)
        except ValueError:
            return {}

    # What the reference says.

    async def _baseline(self, box: Sandbox, problem: KernelProblem, gpu: str) -> Baseline:
        make = partial(self._make_baseline, box, problem, gpu)
        baseline = await self._baselines.get((problem.source, gpu), make, worn=lambda entry: entry.uses >= USES)
        baseline.uses += 1
        return baseline

    async def _make_baseline(self, box: Sandbox, problem: KernelProblem, gpu: str) -> Baseline:
        seeds = _seeds(SETS)
        weights_seed = secrets.randbits(32)
        request = {
            "source": problem.source,
            "seed": secrets.randbits(48),
            "weights_seed": weights_seed,
            "seeds": seeds,
            "order": _seeds(EVENTS),
            "host_order": _seeds(HOST),
            "warm": WARM,
            "device": self._device,
            "compile": self._device == "cuda",
        }
        limits = Limits(
            wall_seconds=300.0,
            cpu_seconds=600,
            memory_bytes=32 << 30,
            disk_bytes=1 << 30,
            processes=256,
            open_files=1024,
            result_bytes=_MESSAGE,
        )
        async with box.spawn(REFERENCE, limits=limits, gpu=self._uuid(gpu)) as child:
            outcome = await self._of_reference(child, pack(request), gpu)
        with require_answer(outcome, problem, "measured", " on the GPU") as answer:
            eager, compiled = _samples(answer["eager"]), answer["compiled"] and _samples(answer["compiled"])
        return Baseline(
            answer=answer,
            seeds=seeds,
            weights_seed=weights_seed,
            eager=eager,
            compiled=compiled or None,
            size=len(outcome.result),
        )

    async def _of_reference(self, child: CandidateProcess, request: bytes, gpu: str) -> Outcome:
        """Its answer: compiled beside whatever else goes on, measured on a GPU of its own."""
        try:
            await child.send(request)
            answer = await child.receive()
            if not answer:  # it is ready
                async with self._alone[gpu]:
                    await child.send(b"measure")
                    answer = await child.receive()
            return replace(await child.finish(), result=answer)
        except CandidateEnded as ended:
            return ended.outcome

    # What a candidate says.

    async def _measured(
        self, box: Sandbox, begin: dict[str, Tree], baseline: Baseline, gpu: str, trial: Trial
    ) -> Measured:
        seconds = self._options.seconds
        limits = Limits(
            wall_seconds=4 * seconds,
            cpu_seconds=int(4 * seconds),
            memory_bytes=16 << 30,
            processes=256,
            open_files=1024,
            result_bytes=_MESSAGE,
        )
        seeds = _seeds(EVENTS + HOST)
        places = _places(len(seeds))
        for place, expected in zip(places, baseline.seeds[1:]):
            seeds[place] = expected
        shared = {"device": self._device, "weights_seed": baseline.weights_seed, "first": baseline.seeds[0]}
        parts = {name: baseline.answer[name] for name in ("init", "state", "inputs", "which")}
        marks = [time.perf_counter()]
        async with box.spawn(CANDIDATE, limits=limits, gpu=self._uuid(gpu)) as child:
            asks = [begin, parts, {}, {"calls": EVENTS + HOST + WARM}]
            for do, ask in zip(PARTS, asks):
                await self._ask(child, {"do": do} | shared | ask, trial)
                marks.append(time.perf_counter())
            async with self._alone[gpu]:
                marks.append(time.perf_counter())
                request = {"do": "measure", "order": seeds[:EVENTS], "host_order": seeds[EVENTS:], "warm": WARM}
                answer = await self._ask(child, request | shared, trial)
            marks.append(time.perf_counter())
            answer |= await self._ask(child, {"do": "check"} | shared, trial)
            samples = self._trusted(answer, trial)
            calls = [*range(len(samples.events)), *range(EVENTS, EVENTS + len(samples.host))]  # that it kept
            looked_at = [("watched", 0)]
            looked_at += [(str(calls.index(one)), number) for number, one in enumerate(places, 1) if one in calls]
            comparisons = [await self._look(child, call, baseline, number, trial) for call, number in looked_at]
            without = await self._look(child, "without", baseline, 0, trial)
            marks.append(time.perf_counter())
        took = {f"speed_{name}": after - before for name, before, after in zip(PARTS, marks, marks[1:])}
        return Measured(samples=samples, comparisons=comparisons, without=without, answer=answer, seconds=took)

    def _trusted(self, answer: dict[str, Any], trial: Trial) -> Samples:
        try:
            samples = _samples(answer)
        except (ValueError, KeyError, TypeError) as error:
            trial.decide("runtime_error", Diagnostic(stage="speed", kind="protocol", message=str(error)[:200]))
        return samples

    async def _ask(self, child: CandidateProcess, request: dict[str, Tree], trial: Trial) -> dict[str, Any]:
        return await trial.ask(child, request, self._options.seconds)

    async def _look(
        self, child: CandidateProcess, call: str, baseline: Baseline, number: int, trial: Trial
    ) -> OutputComparison:
        pattern = Pattern(offset=secrets.randbits(40), step=secrets.randbits(40) | 1)
        request = {"do": "fetch", "call": call, "offset": pattern.offset, "step": pattern.step, "device": self._device}
        reply = await self._ask(child, request, trial)
        expected = baseline.answer["expected"][number]
        return await asyncio.to_thread(self._compare, reply, expected, pattern)

    def _compare(self, reply: dict[str, Any], expected: dict[str, Tree], pattern: Pattern) -> OutputComparison:
        forms_expected = forms(expected["computed"])
        if reply.get("forms") != forms_expected:
            return OutputComparison(
                agrees=False, kind="shape", problem=f"output is {reply.get('forms')}, not {forms_expected}"[:300]
            )
        subset = Expected(exact=sampled(expected["exact"], pattern), computed=sampled(expected["computed"], pattern))
        return compare(reply.get("output"), subset, tf32=self._options.tf32, device=self._device)

    # The judgement.

    def _judge(self, trial: Trial, baseline: Baseline, first: Measured, again: Measured) -> None:
        for comparison in (*first.comparisons, *again.comparisons):
            if not comparison.agrees:
                message = f"inputs of shapes {baseline.answer['shapes']}, on the GPU: {comparison.problem}"
                trial.decide("wrong", Diagnostic(stage="speed", kind=comparison.kind, message=message[:600]))
        for one in (first, again):
            self._evidence(trial, one)
        name = str(baseline.answer["name"])
        floor = timing.floor_of(name, int(baseline.answer["bytes"]), float(baseline.answer["flops"]))
        trial.timing = timing.build_timing(
            device=name,
            first=first.samples,
            again=again.samples,
            eager=baseline.eager,
            compiled=baseline.compiled,
            floor=floor,
        )
        for flag in timing.suspicions(trial.timing, first.samples, again.samples, baseline.eager):
            trial.flags.setdefault(flag.rule, flag)
            trial.diagnostics.append(Diagnostic(stage="speed", kind=flag.rule, message=flag.detail))
        if timing.CHEATS & trial.flags.keys() or trial.cheated():
            trial.timing = None
            trial.decide("hack")
        if {"excessive_speedup", "not_repeatable"} & trial.flags.keys():
            trial.timing = None

    def _evidence(self, trial: Trial, one: Measured) -> None:
        if one.without.agrees:
            trial.flag("decoy_launch", "ablation", "the answer is the same when the kernels do nothing")
        launches, calls = one.answer.get("launches"), one.answer.get("calls")
        if not isinstance(launches, int) or not isinstance(calls, int) or launches < calls:
            trial.flag("no_launch", "launch", "not every timed call launched a kernel")
        allowed = {name.rpartition(".")[2] for name in self._options.allow}
        computed = one.answer.get("computed")
        if isinstance(computed, dict) and set(computed) - allowed:
            trial.flag("torch_computes", "launch", "torch computed: " + ", ".join(sorted(map(str, computed))[:6]))
        if one.answer.get("changed"):
            trial.flag("monkeypatch", "process", f"replaced: {one.answer['changed']}")
        if isinstance(state := one.answer.get("state"), list) and state:
            names = ", ".join(map(str, state[:6]))
            trial.note(f"timed calls changed {names}; each had its values from before again for the next call")
        if one.answer.get("mutated"):
            trial.flags["mutated_input"] = Flag(rule="mutated_input", layer="process", detail="an input was changed")
            trial.decide("wrong", Diagnostic(stage="speed", kind="mutated_input", message="an input was changed"))

    def _uuid(self, gpu: str) -> str | None:
        return gpu if self._device == "cuda" else None


def _seeds(count: int) -> list[int]:
    """No two are the same, nor give the same values."""
    seeds = [secrets.randbits(27) << 20 for _ in range(count)]
    return [high | low for high, low in zip(seeds, secrets.SystemRandom().sample(range(1 << 20), count))]


def _places(count: int) -> list[int]:
    return secrets.SystemRandom().sample(range(count), SETS - 1)


def _samples(times: dict[str, Sequence[float]]) -> Samples:
    return Samples(events=tuple(map(float, times["events"])), host=tuple(map(float, times["host"])))
