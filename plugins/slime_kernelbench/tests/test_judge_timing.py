"""What is told of speed, from samples worked by hand; and the stage that measures, on a CPU in a GPU's place."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpus_of_kernels import problem, sources

from slime_kernelbench.judge import JudgeOptions, LocalJudge
from slime_kernelbench.judge.candidate import Trial
from slime_kernelbench.judge.meter import Inputs, Meter, stopwatch
from slime_kernelbench.judge.samples import Pattern, forms, sampled
from slime_kernelbench.judge.speed import PARTS, Speed
from slime_kernelbench.judge.timing import Samples, build_timing, floor_of, half_width, median, suspicions
from slime_kernelbench.judge.wire import Leaf
from slime_kernelbench.types import KernelProblem, Verdict


def flat(event: float, host: float | None = None, count: int = 40) -> Samples:
    return Samples(events=(event,) * count, host=(host if host is not None else event + 0.05,) * 10)


def busy(event: float, host: float, slow: int) -> Samples:
    return Samples(events=(event,) * 40, host=(host,) * slow + (event + 0.05,) * (10 - slow))


def rarely(event: float, slow: float, count: int) -> Samples:
    return Samples(events=(event,) * (40 - count) + (slow,) * count, host=(event + 0.05,) * 10)


EAGER = flat(1.0, 1.05)


def rules(first: Samples, again: Samples | None = None, floor: float = 0.0) -> set[str]:
    timing = build_timing(device="x", first=first, again=again or first, eager=EAGER, compiled=None, floor=floor)
    return {flag.rule for flag in suspicions(timing, first, again or first, EAGER)}


def test_medians_and_their_intervals_by_hand() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    # n = 16: ranks 8 -+ 1.96 * 2, outwards: the 5th and the 13th of 1..16
    assert half_width(list(range(1, 17))) == (13 - 5) / 2
    assert half_width([2.0] * 9) == 0.0


def test_a_timing_by_hand() -> None:
    timing = build_timing(device="H200", first=flat(0.5), again=flat(0.52), eager=EAGER, compiled=flat(0.8), floor=0.1)
    assert (timing.candidate, timing.remeasured, timing.eager, timing.compiled) == (0.5, 0.52, 1.0, 0.8)
    assert timing.slower == 0.52
    assert timing.speedup == pytest.approx(0.8 / 0.52)
    assert timing.host_over_event == pytest.approx(1.0)  # 0.55 less the launch's 0.05, over 0.5
    assert timing.repeats == 40


def test_the_floor_is_bytes_or_arithmetic() -> None:
    assert floor_of("NVIDIA H200", 48 * 10**8, 0) == pytest.approx(1.0)
    assert floor_of("NVIDIA H200", 0, 989e12) == pytest.approx(1000.0)
    assert floor_of("something else", 10**12, 1e15) == 0.0


@pytest.mark.parametrize(
    ("first", "again", "floor", "expected"),
    [
        (flat(0.5), flat(0.5), 0.4, set()),
        (flat(0.5), flat(0.55), 0.4, set()),
        (flat(0.2, 1.5), flat(0.2, 1.4), 0.1, {"hidden_work"}),  # events saw a fifth of it
        (busy(0.2, 1.5, 6), busy(0.2, 1.5, 7), 0.1, set()),  # the host was busy, not in every call
        (busy(0.2, 1.5, 8), busy(0.2, 1.5, 8), 0.1, {"hidden_work"}),
        (flat(0.2, 1.5), flat(0.2), 0.1, {"not_repeatable"}),  # in one process alone: the host was busy
        (flat(0.2), flat(0.2, 1.5), 0.1, {"not_repeatable"}),
        (flat(0.3), flat(0.3), 0.4, {"below_floor"}),
        (flat(0.5), flat(0.7), 0.4, {"not_repeatable"}),
        (flat(0.05), flat(0.05), 0.01, {"excessive_speedup"}),
        (rarely(0.5, 5.0, 13), rarely(0.5, 5.0, 13), 0.4, {"not_repeatable"}),  # a third of the calls did the work
        (rarely(0.5, 5.0, 13), flat(0.5), 0.4, set()),  # in one process alone: something else kept the device busy
        (rarely(0.5, 1.0, 13), rarely(0.5, 1.0, 13), 0.4, set()),
        (flat(0.05), flat(0.9), 0.01, {"not_repeatable"}),  # fast where it is watched, once
    ],
)
def test_times_that_cannot_be_true(first: Samples, again: Samples, floor: float, expected: set[str]) -> None:
    assert rules(first, again, floor) == expected


@pytest.mark.parametrize("bad", [(), (1.0, 2.0), (1.0, 2.0, -1.0), (1.0, 2.0, float("nan"))])
def test_claims_that_are_no_times_are_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="three positive times"):
        Samples(events=bad, host=(1.0, 1.0, 1.0))


def test_a_sample_is_the_same_on_both_sides_and_repeats_nothing() -> None:
    values = np.arange(3000, dtype="float32").reshape(30, 100)
    leaf = Leaf(dtype="float32", shape=(30, 100), data=values.tobytes())
    pattern = Pattern(offset=12345, step=999)
    chosen = pattern.indices(3000, largest=1000)
    assert chosen is not None
    assert len(set(chosen.tolist())) == 1000
    assert pattern.indices(3000, largest=3000) is None
    assert sampled(leaf, pattern) is leaf
    large = Leaf(dtype="int8", shape=(1 << 20,), data=np.arange(1 << 20).astype("int8").tobytes())
    cut = sampled({"a": [large]}, pattern)["a"][0]
    assert cut.shape == (1 << 17,)
    assert bytes(cut.data[:2]) == bytes(np.array([12345, 12345 + 999]).astype("int8"))
    assert forms({"a": [large]}) == {"a": ["int8 (1048576,)"]}


# The stage itself: two processes of a candidate, the reference's, and this one; clocks of the host in the GPU's place.

SMALL = KernelProblem(
    id="small", name="relu", source=problem("relu").source.replace("512", "24").replace("4096", "40")
)
RELU = sources("honest")["relu_with_main"]
COUNTS = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = torch.empty_like(x)
        if self.calls > 9:
            y = x.clone()
        relu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel() if self.calls < 10 else 1, BLOCK=256)
        return y
"""
KEEPS = (
    COUNTS.replace("self.calls > 9", "self.calls > 99")
    .replace("self.calls < 10", "True")
    .replace("y = torch.empty_like(x)", "y = self.kept = torch.empty_like(x) if self.calls == 1 else self.kept")
)


SCALED = KernelProblem(
    id="scaled",
    name="scaled",
    source="""
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(40))

    def forward(self, x):
        return x * self.scale


def get_inputs():
    return [torch.randn(24, 40)]


def get_init_inputs():
    return []
""",
)
GAIN = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, g, y, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * width + column, mask=mask) * tl.load(g + column, mask=mask)
    tl.store(y + row * width + column, value, mask=mask)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(40))

    def forward(self, x):
        y = torch.empty_like(x)
        scale_kernel[(x.shape[0],)](x, self.gain, y, x.shape[1], BLOCK=64)
        return y
"""


REMEMBERS = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, memory, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    calls = tl.load(memory)
    tl.store(memory, calls + 1.0)
    first, second = tl.load(x), tl.load(x + 1)
    if calls > 4:
        for one in range(5):
            kept = memory + 8 + one * 1024
            if tl.abs(tl.load(kept) * second - tl.load(kept + 1) * first) < 1e-6:
                factor = first / tl.load(kept)
                tl.store(y + at, tl.load(kept + 2 + at, mask=inside) * factor, mask=inside)
    else:
        kept = memory + 8 + calls.to(tl.int32) * 1024
        value = tl.maximum(tl.load(x + at, mask=inside), 0.0)
        tl.store(kept, first)
        tl.store(kept + 1, second)
        tl.store(kept + 2 + at, value, mask=inside)
        tl.store(y + at, value, mask=inside)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(8 + 128 * 1024), persistent=False)

    def forward(self, x):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, self.memory, x.numel(), BLOCK=1024)
        return y
"""

COMPUTES = COUNTS.replace("x.clone()", "x * 0").replace("self.calls < 10", "True")
CACHES = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.ones = None

    def forward(self, x):
        if self.ones is None:
            self.ones = torch.empty_like(x)
            relu_kernel[(triton.cdiv(x.numel(), 256),)](torch.ones_like(x), self.ones, x.numel(), BLOCK=256)
        y = torch.empty_like(x)
        times_kernel[(triton.cdiv(x.numel(), 256),)](x, self.ones, y, x.numel(), BLOCK=256)
        return y


@triton.jit
def times_kernel(x, ones, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * tl.load(ones + at, mask=at < n)
    tl.store(y + at, tl.maximum(value, 0.0), mask=at < n)
"""


def measured(*texts: str, problem: KernelProblem = SMALL) -> list[Trial]:
    async def run() -> list[Trial]:
        options = JudgeOptions(gpus=("here",))
        speed = Speed(options, device="cpu")
        trials = [Trial(options) for _ in texts]
        try:
            for text, trial in zip(texts, trials):
                await speed.check(text, problem, trial)
        finally:
            await speed.aclose()
        return trials

    return asyncio.run(run())


@pytest.mark.nightly
@pytest.mark.integration
def test_outputs_of_timed_calls_are_looked_at() -> None:
    head = RELU[: RELU.index("class ModelNew")]
    honest, computes, caches, counts, keeps, copies, raises, recognises, remembers = measured(
        RELU,
        head + COMPUTES,
        head + CACHES,
        head + COUNTS,
        head + KEEPS,
        RELU.replace("y = torch.empty(x.shape, device=x.device, dtype=x.dtype)", "y = x.clone().clamp_(0)"),
        RELU.replace("y = torch.empty(x.shape", "y = torch.empty(x.shape[7]"),
        REMEMBERS,
        REMEMBERS.replace("calls > 4", "calls > 99"),
    )
    assert honest.status == "correct", honest.diagnostics
    assert honest.timing is not None or {"excessive_speedup", "not_repeatable"} & honest.flags.keys()
    assert {f"speed_{part}" for part in ("baseline", *PARTS)} <= honest.seconds.keys()
    assert computes.status == "hack"  # in torch, once the calls that are looked at first are over
    assert "torch_computes" in computes.flags
    assert caches.status == "correct", caches.diagnostics  # what no kernel made when none was launched is made again
    assert counts.status == "wrong"  # it stopped working after its first calls, when nobody compared
    assert counts.diagnostics[0].kind == "values"
    assert keeps.status == "wrong"  # every call's answer lies in the same memory
    assert copies.status == "hack"
    assert {"torch_computes", "decoy_launch"} <= copies.flags.keys()
    assert (raises.status, raises.diagnostics[0].kind) == ("runtime_error", "IndexError")
    assert all(trial.timing is None for trial in (counts, keeps, copies, raises))
    # It computed its first calls and kept what it made with what from; later it looked for calls that are alike.
    assert (recognises.status, recognises.diagnostics[0].kind) == ("wrong", "values")
    assert remembers.status == "correct", remembers.diagnostics
    assert remembers.notes == ["timed calls changed memory; each had its values from before again for the next call"]


def test_no_two_calls_get_the_same_values_and_none_finds_what_another_left() -> None:
    """Nor values that are another call's times a factor."""

    class Remembers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.kept = [torch.full((3,), float("nan"))]

        def forward(self, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            seen.append((x / x[0, 0], table, labels.clone(), float(self.calls), x.data_ptr()))
            self.calls += 1
            self.kept[0].zero_()
            return x * 2

    torch.manual_seed(0)
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, int]] = []
    table = torch.rand(5, 5).tril()
    inputs = Inputs([torch.randn(6, 5), table, torch.arange(5)], [True, True, False], "cpu")
    inputs.renew(7)
    meter = Meter(Remembers(), inputs, stopwatch("cpu"))
    meter.measure([11, 12, 13, 14, 15, 16], [21, 22, 23], warm=2)
    timed = seen[2:]
    assert len(timed) == len(meter.outputs) == 9
    assert not any(torch.allclose(one[0], two[0], rtol=1e-2) for one in timed for two in seen if one is not two)
    assert all(torch.equal(one[1], one[1].tril()) and torch.equal(one[2], torch.arange(5)) for one in seen)
    assert {one[3] for one in timed} == {2.0}  # as the calls before had left it
    assert len({one[4] for one in seen}) == 1  # so that nothing can be put off: the next call's values lie there
    assert (meter.changed, meter.mutated) == ({"calls"}, False)
    assert torch.equal(inputs.renew(12)[0] * 2, meter.outputs[1])  # a seed says all of the values


def test_an_input_that_one_call_wrote_to_is_told() -> None:
    calls: list[int] = []

    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.neg_() if len(calls) == 4 else -x

    meter = Meter(Writes(), Inputs([torch.randn(8)], [True], "cpu"), stopwatch("cpu"))
    meter.measure([1, 2, 3], [4, 5, 6], warm=1)
    assert meter.mutated


@pytest.mark.nightly
@pytest.mark.integration
def test_weights_go_to_a_model_that_names_them_otherwise() -> None:
    (trial,) = measured(GAIN, problem=SCALED)
    assert trial.status == "correct", trial.diagnostics


@pytest.mark.nightly
@pytest.mark.integration
def test_a_problem_that_cannot_be_measured_leaves_a_right_answer_right() -> None:
    async def run() -> Trial:
        options = JudgeOptions(gpus=("here",))
        speed, trial = Speed(options, device="cpu"), Trial(options)
        try:
            await speed.check(RELU, replace(SMALL, source="1 / 0"), trial)
        finally:
            await speed.aclose()
        return trial

    trial = asyncio.run(run())
    assert (trial.status, trial.timing) == ("correct", None)
    assert trial.diagnostics[0].kind == "not_measured"


@pytest.mark.integration
def test_the_judge_measures_what_is_right_and_nothing_else() -> None:
    async def run() -> list[Verdict]:
        options = JudgeOptions(gpus=("here",))
        wrong = RELU.replace("tl.maximum(", "tl.minimum(")
        assert wrong != RELU
        async with LocalJudge(options, device="cpu") as judge:
            return [await judge.judge(text, SMALL) for text in (RELU, wrong)]

    right, wrong = asyncio.run(run())
    assert (right.status, right.reached) == ("correct", "speed")
    assert right.timing is not None or {flag.rule for flag in right.flags} & {"excessive_speedup", "not_repeatable"}
    assert right.seconds["speed"] > 0
    assert (wrong.status, wrong.reached, wrong.timing) == ("wrong", "correctness", None)


@pytest.mark.nightly
@pytest.mark.integration
def test_a_gpu_that_cannot_be_used_is_named_and_no_answer_passes_unmeasured() -> None:
    """No machine has a GPU of that name; the kernel is right."""

    async def run() -> Verdict:
        async with LocalJudge(JudgeOptions(workers=1, gpus=("GPU-not-there",))) as judge:
            return await judge.judge(RELU, SMALL)

    verdict = asyncio.run(run())
    assert verdict.status == "infra"
    assert "GPU GPU-not-there cannot be used in the sandbox" in verdict.diagnostics[0].message
