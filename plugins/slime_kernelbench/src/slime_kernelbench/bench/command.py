"""What `slime kernelbench bench` does: sample or read, judge, count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_core import ConfigError, SamplingParams
from slime_kernelbench.bench.answers import BenchAnswer, no_code, read_answers, write_answers
from slime_kernelbench.bench.metrics import figures
from slime_kernelbench.problems import load
from slime_kernelbench.types import Judge, Verdict

PS = (0.0, 1.0, 1.5, 2.0)


async def run_bench(
    judge: Judge,
    *,
    at_once: int,
    say: Callable[[str], None],
    model: Path | None,
    where: str,
    levels: Sequence[int],
    samples: int,
    ks: Sequence[int],
    ps: Sequence[float],
    answers: Path | None,
    out: Path | None,
    temperature: float,
    max_tokens: int,
    prompt_template: str,
    seed: int,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """The figures of a model, or of finished answers, JSON-ready.

    Raises:
        ConfigError: CFG04 neither or both are named, or k is more than the samples.
        DataError: as `load` and `read_answers`.
    """
    if (model is None) == (answers is None):
        raise ConfigError(
            "name a model folder, or finished answers",
            code="CFG04",
            where="slime kernelbench bench",
            fix="slime kernelbench bench MODEL_DIR   or   slime kernelbench bench --answers FILE.jsonl",
        )
    problems = load(where, levels=levels)
    if model is None:
        assert answers is not None
        rows = read_answers(answers, problems)
    else:
        from slime_kernelbench.bench.sampling import sample
        from slime_kernelbench.dialogue.words import load_words

        _check_k(ks, samples)
        params = SamplingParams(max_new_tokens=max_tokens, temperature=temperature)
        words, flags = load_words(prompt_template), list(overrides)
        progress = lambda problem: say(f"sampled {problem.id}")  # noqa: E731
        rows = await sample(
            model, problems, samples=samples, words=words, params=params, seed=seed, overrides=flags, progress=progress
        )
    verdicts = await judge_answers(rows, judge, at_once=at_once)
    if out is not None:
        write_answers(out, rows, verdicts)
    return figures(_by_problem(rows, verdicts), ks=ks or (1,), ps=ps or PS)


async def judge_answers(answers: Sequence[BenchAnswer], judge: Judge, *, at_once: int) -> list[Verdict]:
    """A verdict an answer, in order; one without code is never sent."""
    free = asyncio.Semaphore(at_once)

    async def one(answer: BenchAnswer) -> Verdict:
        if answer.source is None:
            return no_code(answer)
        async with free:
            return await judge.judge(answer.source, answer.problem)

    return list(await asyncio.gather(*map(one, answers)))


def table(report: dict[str, Any]) -> list[list[str]]:
    """The rows of a report for people: figure, value, interval, problems."""
    rows = [
        ["compiled", *_cells(report["compiled"])],
        ["correct", *_cells(report["correct"])],
        *([f"pass@{k}", *_cells(figure)] for k, figure in report["pass@k"].items()),
    ]
    for base, shares in report["fast_p"].items():
        rows += [[f"fast_{p} over {base}", *_cells(figure)] for p, figure in shares.items()]
    statuses = ", ".join(f"{count} {status}" for status, count in report["statuses"].items())
    return [*rows, ["verdicts", statuses, "", str(report["problems"])]]


def _cells(figure: dict[str, float] | None) -> list[str]:
    if figure is None:
        return ["not measured", "", ""]
    return [f"{figure['value']:.3f}", f"{figure['low']:.3f} to {figure['high']:.3f}", str(figure["problems"])]


def _check_k(ks: Sequence[int], samples: int) -> None:
    if ks and max(ks) > samples:
        raise ConfigError(
            f"pass@{max(ks)} needs {max(ks)} samples of a problem, not {samples}",
            code="CFG04",
            where="--k",
            fix=f"--samples {max(ks)}",
        )


def _by_problem(answers: Sequence[BenchAnswer], verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    verdicts_of: dict[str, list[Verdict]] = {}
    for answer, verdict in zip(answers, verdicts, strict=True):
        verdicts_of.setdefault(answer.problem.id, []).append(verdict)
    return verdicts_of
