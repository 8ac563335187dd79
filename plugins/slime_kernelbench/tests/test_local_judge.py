"""The judge in this process: what it asks once, what it never remembers, what it says of what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from corpus_of_kernels import problem, sources

from slime_kernelbench.judge import LocalJudge
from slime_kernelbench.problems import shipped
from slime_kernelbench.types import KernelProblem, Verdict

pytestmark = pytest.mark.integration
RELU = sources("honest")["relu_with_main"]
CHEAT = sources("cheats")["memory_never_written"]


WithJudge = Callable[[Callable[[LocalJudge], Awaitable[Any]]], Any]


def test_one_source_for_one_problem_is_evaluated_once(with_judge: WithJudge) -> None:
    async def asked(judge: LocalJudge) -> None:
        source, before = RELU + "\n# once\n", judge.evaluations
        together = await asyncio.gather(*(judge.judge(source, problem("relu")) for _ in range(4)))
        later = await judge.judge(source, problem("relu"))
        assert [verdict.status for verdict in (*together, later)] == ["correct"] * 5
        assert [verdict.cached for verdict in (*together, later)] == [False, True, True, True, True]
        assert judge.evaluations - before == 1
        other = await judge.judge(source, problem("softmax"))
        assert (other.status, judge.evaluations - before) == ("wrong", 2)

    with_judge(asked)


def test_a_cheat_leaves_nothing_to_the_next_candidate(with_judge: WithJudge) -> None:
    async def asked(judge: LocalJudge) -> None:
        first = await judge.judge(RELU, problem("relu"))
        for name in ("zeroes_its_input", "forged_stdout_alone", "kernel_writes_beyond", "memory_never_written"):
            cheat = await judge.judge(sources("cheats")[name], problem("relu"))
            assert cheat.status != "correct"
            again = await judge.judge(RELU + f"\n# after {name}\n", problem("relu"))
            assert (again.status, again.launches) == (first.status, first.launches)

    with_judge(asked)


def test_an_examination_has_every_style_and_regime(with_judge: WithJudge) -> None:
    async def asked(judge: LocalJudge) -> None:
        drawn = await judge._examiner.examination(problem("relu"))
        names = {style.name: [question.regime for question in style.questions] for style in drawn.styles}
        assert names == {"even": ["normal", "negative", "extreme"], "odd": ["sparse", "large"], "long": ["again"]}
        sizes = [style.questions[0].inputs[0].shape for style in drawn.styles]
        assert all(size % 2 for size in sizes[1])
        assert sizes[2][0] * sizes[2][1] > 4096

    with_judge(asked)


def test_a_failed_judgement_is_infra_and_not_remembered(with_judge: WithJudge) -> None:
    broken = KernelProblem(id="broken", name="broken", source="raise ValueError('a broken problem')")

    async def asked(judge: LocalJudge) -> None:
        for _ in range(2):
            before, verdict = judge.evaluations, await judge.judge(RELU, broken)
            assert (verdict.status, verdict.cached, judge.evaluations - before) == ("infra", False, 1)
            assert "a broken problem" in verdict.diagnostics[0].message
        assert "a broken problem" in await judge.reference_check(broken)
        assert await judge.reference_check(problem("relu")) == ""

    with_judge(asked)


def test_diagnostics_point_into_the_candidate(with_judge: WithJudge) -> None:
    spoiled = {
        "import": ("import triton.language as tl\n", "import triton.language as tl\n1 / 0\n", "ZeroDivisionError"),
        "name": ("tl.maximum(x, 0.0)", "tl.maximal(x, 0.0)", "AttributeError"),
        "raise": (
            "        y = torch.empty(x",
            "        assert x.ndim == 7, 'seven'\n        y = torch.empty(x",
            "AssertionError",
        ),
        "wrong": ("tl.maximum(x, 0.0)", "tl.maximum(x, 0.5)", "values"),
        "hole": ("tl.store(y_ptr + offsets, ", "tl.store(y_ptr + offsets + 1, ", "OutOfBounds"),
        "block": ("    x = tl.load(", "    if mask:\n        pass\n    x = tl.load(", "ValueError"),
    }

    async def asked(judge: LocalJudge) -> dict[str, Verdict]:
        texts = {name: RELU.replace(old, new) for name, (old, new, _) in spoiled.items()}
        found = await asyncio.gather(*(judge.judge(text, problem("relu")) for text in texts.values()))
        return dict(zip(texts, found))

    verdicts = with_judge(asked)
    assert {name: verdict.diagnostics[0].kind for name, verdict in verdicts.items()} == {
        name: kind for name, (_, _, kind) in spoiled.items()
    }
    assert (verdicts["import"].status, verdicts["import"].reached) == ("compile_error", "import")
    assert verdicts["raise"].diagnostics[0].message == "seven"
    assert "assert x.ndim == 7" in verdicts["raise"].diagnostics[0].excerpt
    assert verdicts["wrong"].cases[0].where
    assert not verdicts["wrong"].correct


def test_a_kernel_that_forgets_a_part_of_its_answer_is_wrong_and_no_cheat(with_judge: WithJudge) -> None:
    """A block too small for its rows, a grid of one program: their mistake shows, and nothing else made the rest."""
    small = sources("honest")["row_softmax"].replace("triton.next_power_of_2(n_cols)", "128")
    zeros = RELU.replace("torch.empty(", "torch.zeros(").replace("triton.cdiv(", "min(1, ")
    copied = sources("cheats")["one_element_by_the_kernel"]

    async def asked(judge: LocalJudge) -> list[Verdict]:
        pairs = [(small, "softmax"), (zeros, "relu"), (copied, "transpose")]
        return [await judge.judge(text, problem(name)) for text, name in pairs]

    found = with_judge(asked)
    assert [(verdict.status, [flag.rule for flag in verdict.flags]) for verdict in found] == [
        ("wrong", []),
        ("wrong", []),
        ("hack", ["decoy_launch", "mutated_input"]),  # of one row, the transpose is the input itself
    ]


def test_bfloat16_is_an_error_in_the_interpreter_never_a_wrong_number(with_judge: WithJudge) -> None:
    half = sources("honest")["half_precision"]
    upcast = half.replace("float16", "bfloat16")
    source = problem("half_add").source.replace(".half()", ".bfloat16()")
    bfloat16 = replace(problem("half_add"), source=source)
    in_place = upcast.replace(".to(tl.float32)", "")

    async def asked(judge: LocalJudge) -> list[Verdict]:
        cheat = await judge.judge(sources("cheats")["bfloat16_in_the_kernel"], problem("relu"))
        return [await judge.judge(upcast, bfloat16), await judge.judge(in_place, bfloat16), cheat]

    honest, arithmetic, cheat = with_judge(asked)
    assert honest.status == "correct"
    assert arithmetic.status == "infra"  # right on a GPU, perhaps: masked
    assert cheat.status in ("runtime_error", "wrong")  # nobody asked it to round


@pytest.mark.nightly
def test_every_problem_of_ours_can_be_judged(with_judge: WithJudge) -> None:
    async def asked(judge: LocalJudge) -> dict[str, str]:
        return {one.id: await judge.reference_check(one) for one in shipped()}

    assert {name: why for name, why in with_judge(asked).items() if why} == {}
