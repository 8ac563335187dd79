"""The tasks of the embedded default by name, as rows.

kernelbench_family           operators that the warm-up saw too, as problems to train on
kernelbench_family_pupil     what a careless pupil wrote for operators of that side, for a supervised stage
kernelbench_family_heldout   operators and shapes that no stage ever trains on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_core import ConfigError, Context
from slime_core.data import chat
from slime_core.data.turns import Speech
from slime_core.types import Message
from slime_kernelbench.dialogue.context import history_prompt
from slime_kernelbench.dialogue.words import Words
from slime_kernelbench.problems.prompts import ProblemRows
from slime_kernelbench.types import KernelProblem, Verdict
from slime_kernelbench.warmup.pupil import Habits, TurnDemonstrations, Voice, fenced
from slime_kernelbench.warmup.rows import Family

if TYPE_CHECKING:
    from slime_kernelbench.options import Options

TRAIN, PUPIL, HELDOUT = "kernelbench_family", "kernelbench_family_pupil", "kernelbench_family_heldout"
TASKS = (TRAIN, PUPIL, HELDOUT)
Render = Callable[[KernelProblem], str | list[Message]]
Tell = Callable[[Verdict], str]


def family_rows(
    task: str, ctx: Context, *, render: Render, speech: Speech, words: Words, tell: Tell
) -> ProblemRows | TurnDemonstrations:
    """The rows of one of ``TASKS``.

    Args:
        render: the prompt of a problem's first turn
        speech: what stands between two answers
        words: of a history of attempts
        tell: feedback on a first attempt

    Raises:
        ConfigError: CFG05 there is no such task.
    """
    options: Options = ctx.options
    family = Family(heldout=options.heldout, seed=options.split_seed)
    if task == TRAIN:
        return ProblemRows(family.problems("train", options.family_problems), render=render)
    if task == HELDOUT:
        return ProblemRows(family.problems("heldout", options.family_heldout), render=render)
    if task != PUPIL:
        fix = ", ".join(TASKS)
        raise ConfigError(f"kernelbench has no task '{task}'", code="CFG05", where="data.tasks", fix=fix)
    habits = Habits(slips=options.pupil_slips, mends=options.pupil_mends, later=options.pupil_later)
    voice = voice_of(ctx, render=render, speech=speech, words=words, tell=tell)
    return TurnDemonstrations(family.operators("train"), habits, voice, seed=options.split_seed)


def voice_of(ctx: Context, *, render: Render, speech: Speech, words: Words, tell: Tell) -> Voice:
    """How the pupil's dialogues become ids: as those of the run do."""

    def encode(prompt: str | list[Message]) -> list[int]:
        template = speech.template or not isinstance(prompt, str)
        text = chat.render(prompt, ctx.tokenizer, template=template, where="the pupil", kwargs=speech.kwargs)
        tokens: list[int] = chat.encode(ctx.tokenizer, text)
        return tokens

    def again(prompt: str | list[Message], source: str, verdict: Verdict) -> list[int]:
        if ctx.options.context == "history":
            return history_prompt(prompt, [words.block(1, source, tell(verdict))], 2, speech, words)
        end: Any = ctx.tokenizer.eos_token_id
        answer = [*chat.encode(ctx.tokenizer, fenced(source)), *([] if end is None else [int(end)])]
        return [*encode(prompt), *answer, *speech.between(tell(verdict), answer)]

    return Voice(ask=render, again=again)
