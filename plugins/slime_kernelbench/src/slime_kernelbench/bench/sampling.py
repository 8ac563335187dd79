"""Sampling of answers from a model folder, by the engine that `slime eval` would serve it with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_core import ConfigError, EngineError, SamplingParams
from slime_core.types import GenerateRequest
from slime_kernelbench.bench.answers import BenchAnswer
from slime_kernelbench.dialogue.words import Words
from slime_kernelbench.types import KernelProblem


async def sample(
    model: Path,
    problems: Sequence[KernelProblem],
    *,
    samples: int,
    words: Words,
    params: SamplingParams,
    seed: int = 0,
    overrides: Sequence[str] = (),
    progress: Callable[[KernelProblem], None] = lambda problem: None,
) -> list[BenchAnswer]:
    """``samples`` answers to each problem, in order. The same seed draws the same answers.

    Args:
        overrides: flags of slime's core for the engine, such as ("--dtype", "float32").

    Raises:
        ConfigError: CFG05 the folder holds no model; or a flag that is none.
    """
    from slime_core.clusters import build_serving
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import load_config
    from slime_core.data.chat import encode, render
    from slime_core.seeds import seed_of

    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model} holds no model", code="CFG05", where=str(model.absolute()), fix="name a Hugging Face folder"
        )
    flags = ["--hf-checkpoint", str(model), "--init-weights", "load", *overrides]
    config = resolve_machine(load_config(None, flags), trains=False)
    async with build_serving(config) as serving:
        chat = bool(getattr(serving.tokenizer, "chat_template", None))

        async def one(problem: KernelProblem, tokens: list[int], number: int) -> BenchAnswer:
            name = f"{problem.id}#{number}"
            request = GenerateRequest(id=name, tokens=tokens, params=params, seed=seed_of(seed, "bench", name))
            try:
                return BenchAnswer.of(problem, _text(serving.tokenizer, await serving.engines.generate(request)))
            except EngineError as error:
                if not error.ends_dialogue:
                    raise
                return BenchAnswer(
                    problem=problem, text="", source=None, why=error.what
                )  # the model's limit, so a failure

        async def several(problem: KernelProblem) -> list[BenchAnswer]:
            prompt = words.prompt(problem, chat=chat)
            text = render(prompt, serving.tokenizer, template=chat, where=problem.where)
            tokens = encode(serving.tokenizer, text)
            samples_of = await asyncio.gather(*(one(problem, tokens, number) for number in range(samples)))
            progress(problem)
            return list(samples_of)

        return [answer for samples_of in await asyncio.gather(*map(several, problems)) for answer in samples_of]


def _text(tokenizer: Any, done: Any) -> str:
    from slime_core.data.chat import decode

    return str(done.text) or decode(tokenizer, done.tokens)
