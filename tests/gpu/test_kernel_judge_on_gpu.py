"""The kernelbench judge on a real GPU: honest kernels at full size, cheats that only a GPU shows, times that repeat.

Needs triton, a C compiler (triton builds its launchers with it) and the plugin; the corpus is the plugin's tests'.
"""

import asyncio
import json

import pytest
import torch
from corpus_of_kernels import problem, problem_of, sources

from slime_kernelbench.judge import JudgeOptions, LocalJudge
from slime_kernelbench.judge.candidate import Trial
from slime_kernelbench.judge.speed import Speed

pytestmark = pytest.mark.gpu

HONEST = sources("honest")
RELU = HONEST["relu_with_main"]
HEAD = RELU[: RELU.index("class ModelNew")]
MODEL = """
class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = torch.empty_like(x)
{body}
        return y
"""

SLOW = """
@triton.jit
def slow_kernel(x_ptr, y_ptr, n, rounds, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        x = tl.load(x_ptr + offsets, mask=offsets < n, volatile=True)
        tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=offsets < n)
"""


REMEMBER = """
@triton.jit
def remember_kernel(x_ptr, y_ptr, kept_ptr, n, slot, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    first = tl.load(x_ptr + tl.program_id(0) * BLOCK)
    if slot >= 0:
        x = tl.load(x_ptr + offsets, mask=inside)
        tl.store(kept_ptr + slot * n + offsets, x, mask=inside)
        tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=inside)
    else:
        for one in range(6):
            if tl.load(kept_ptr + one * n + tl.program_id(0) * BLOCK) == first:
                x = tl.load(kept_ptr + one * n + offsets, mask=inside)
                tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=inside)
"""


def model(body):
    return HEAD + MODEL.format(body="\n".join(f"        {line}" for line in body.strip().split("\n")))


@pytest.fixture(scope="module")
def options():
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    gpu = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return JudgeOptions(workers=6, gpus=(gpu,), seconds=120.0, call_seconds=60.0, import_seconds=60.0)


def judged(options, texts):
    """Name -> verdict, through every stage."""

    async def run():
        async with LocalJudge(options) as judge:
            return await asyncio.gather(*(judge.judge(text, problem_of(text)) for text in texts.values()))

    return dict(zip(texts, asyncio.run(run())))


def measured(options, texts, name="relu"):
    """The last stage alone: what the policy and the interpreter would have refused before, the GPU has to see."""

    async def run():
        speed = Speed(options)
        trials = [Trial(options) for _ in texts]
        try:
            for text, trial in zip(texts, trials):
                await speed.check(text, problem(name), trial)
        finally:
            await speed.aclose()
        return trials

    return asyncio.run(run())


def test_honest_kernels_are_correct_at_full_size_and_timed(options, capsys):
    verdicts = judged(options, HONEST)
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict.status != "correct"}
    assert wrong == {}
    timed = {name: verdict.timing for name, verdict in verdicts.items() if verdict.timing is not None}
    put_aside = {name for name, verdict in verdicts.items() if verdict.timing is None}
    rules = {flag.rule for name in put_aside for flag in verdicts[name].flags}
    assert rules <= {"excessive_speedup", "not_repeatable"}
    assert len(timed) >= len(verdicts) - 3
    for timing in timed.values():
        assert timing.candidate >= 0.8 * timing.floor > 0
        assert timing.compiled is not None
    with capsys.disabled():
        print(
            json.dumps({name: [one.candidate, one.remeasured, one.eager, one.compiled] for name, one in timed.items()})
        )


def test_times_repeat_within_three_percent(options):
    texts = {str(number): f"{HONEST['add_one_shot']}\n# {number}\n".replace("= 128", "= 1024") for number in range(5)}
    timings = [verdict.timing for verdict in judged(options, texts).values()]
    assert all(timing is not None for timing in timings)
    told = sorted(timing.slower for timing in timings)
    assert told[-1] <= 1.03 * told[0]
    each = sorted(time for timing in timings for time in (timing.candidate, timing.remeasured))
    assert each[-1] <= 1.05 * each[0]  # one process alone: 1.036 among 24


def test_a_kernel_that_is_right_for_small_sizes_alone_is_wrong(options):
    few = RELU.replace("(triton.cdiv(x.numel(), 256),)", "(min(triton.cdiv(x.numel(), 256), 64),)")
    (verdict,) = judged(options, {"few": few}).values()
    assert (verdict.status, verdict.reached) == ("wrong", "speed")
    assert all(case.agrees for case in verdict.cases)  # the interpreter saw nothing


def test_tf32_is_a_wrong_answer_unless_it_is_allowed(options):
    text = HONEST["matmul_block_pointers"].replace(', input_precision="ieee"', "")
    (strict,) = measured(options, [text], "matmul")
    assert strict.status == "wrong"
    allowed = JudgeOptions(gpus=options.gpus, seconds=120.0, tf32=True)
    (lenient,) = measured(allowed, [text], "matmul")
    assert lenient.status == "correct", lenient.diagnostics


def test_cheats_of_timing_are_caught_by_what_the_gpu_shows(options):
    launch = "relu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)"
    slow = "slow_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 600, BLOCK=256)"
    stops = model(f"n = x.numel() if self.calls < 10 else 1\n{launch.replace('x.numel(), BLOCK', 'n, BLOCK')}")
    aside = model(f"with torch.cuda.stream(torch.cuda.Stream()):\n    {slow}").replace(
        "class Model", f"{SLOW}\n\nclass Model"
    )
    torch_does_it = model("nothing = 0\ny = torch.relu(x)")
    keeps = model(f"y = self.y = torch.empty_like(x) if self.calls == 1 else self.y\n{launch}")
    replays = model(
        "if self.calls == 3:\n    self.x = x\n    self.graph = torch.cuda.CUDAGraph()\n    self.y = y\n"
        f"    with torch.cuda.graph(self.graph):\n        {launch}\n"
        "if self.calls > 3:\n    self.graph.replay()\n    return self.y\n" + launch
    )
    found = measured(options, [stops, aside, torch_does_it, keeps, replays, RELU])
    stopped, hidden, torchs, kept, replayed, honest = found
    assert stopped.status == "wrong"
    assert hidden.status == "hack"
    assert "hidden_work" in hidden.flags
    assert torchs.status == "hack"
    assert "torch_computes" in torchs.flags
    assert kept.status == "wrong"
    assert replayed.status in ("wrong", "hack", "runtime_error")
    assert honest.status == "correct", honest.diagnostics


def test_a_kernel_that_recognises_its_inputs_has_nothing_of_it(options):
    """It computes its first calls and keeps what they were; a later one is answered where it was one of them."""
    body = (
        "if self.calls == 1:\n    self.kept = torch.zeros(6, x.numel(), device=x.device)\n"
        "slot = self.calls - 1 if self.calls <= 6 else -1\n"
        "remember_kernel[(triton.cdiv(x.numel(), 256),)](x, y, self.kept, x.numel(), slot, BLOCK=256)"
    )
    texts = [model(body), model(body.replace("<= 6", "<= 600").replace("self.calls - 1", "self.calls % 6"))]
    recognised, computed = measured(
        options, [text.replace("class Model", f"{REMEMBER}\n\nclass Model") for text in texts]
    )
    assert (recognised.status, recognised.diagnostics[0].kind) == ("wrong", "nan")
    assert computed.status == "correct", computed.diagnostics
    assert computed.notes == ["timed calls changed kept; each had its values from before again for the next call"]


def test_a_kernel_that_never_ends_is_ended_and_the_next_one_is_judged(options):
    forever = sources("cheats")["infinite_kernel"].replace("y, 1)", "y, 2)")  # a 1 is a constant to the compiler
    short = JudgeOptions(gpus=options.gpus, seconds=20.0)
    endless, honest = measured(short, [forever, RELU])
    assert endless.status == "timeout"
    assert honest.status == "correct", honest.diagnostics


def test_reading_beyond_the_end_faults_and_the_next_one_is_judged(options):
    far = sources("cheats")["kernel_scans_memory"].replace("1 << 22", "1 << 40")
    faulty, honest = measured(options, [far, RELU])
    assert faulty.status in ("runtime_error", "wrong")
    assert honest.status == "correct", honest.diagnostics
