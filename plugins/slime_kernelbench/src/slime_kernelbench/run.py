"""What the hooks of one run share: its judge, its file of turns, its words. Opened when first needed.

slime_prompts -> prompts            slime_generate -> Run.generate -> dialogue.turns
slime_reward -> Run.reward -> dialogue.scoring -> records
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import ConfigError, Context, Group, Reward, Sample
from slime_core.notices import notice
from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.dialogue.extract import extract
from slime_kernelbench.dialogue.feedback import tell
from slime_kernelbench.dialogue.scoring import score_group
from slime_kernelbench.dialogue.turns import (
    TURN,
    Room,
    generate_group,
    judged,
    occasion,
    problem_of,
    speech_of,
    turn_of,
)
from slime_kernelbench.dialogue.words import Words, load_words
from slime_kernelbench.patience import Patient
from slime_kernelbench.problems.prompts import rows_of
from slime_kernelbench.records import FILE, Records, record
from slime_kernelbench.secret import FILE as SECRET, Secret
from slime_kernelbench.types import Judge, KernelProblem, Verdict

if TYPE_CHECKING:
    from slime_core.protocols import PromptSource
    from slime_kernelbench.options import Options

FAMILY = "kernelbench_family"  # how the names of the embedded default's tasks begin


class KernelbenchRun:
    """The open parts of a run; several stages with other options of the judge have a judge each.

    ``judge`` is one to use in place of those that the options name.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge
        self._judges: dict[tuple[Any, ...], Judge] = {}
        self._records: dict[Path, Records] = {}
        self._writing = asyncio.Lock()

    async def generate(self, group: Group, ctx: Context) -> Group:
        """A group's dialogues."""
        words = words_of(ctx.options.prompt_template)
        messages = not isinstance(group.prompt.prompt, str)
        return await generate_group(group, Room.of(ctx, self.judge(ctx), words, messages=messages))

    async def reward(self, group: Group, ctx: Context) -> list[Reward]:
        """One Reward a turn; the turns go into the run's file."""
        check_reward_section(ctx)
        for sample in group.samples:
            if turn_of(sample) is None:
                await self._judge_foreign(sample, group, ctx)
        scores = score_group(group, ctx.options, evaluation=ctx.evaluation)
        if ctx.run_dir is not None:
            tokens = ctx.options.record_tokens
            turns = [record(scored, group, ctx, tokens=tokens) for scored in scores]
            await self._write(ctx.run_dir, problem_of(group), turns)
        return [scored.reward for scored in scores]

    def judge(self, ctx: Context) -> Judge:
        """The judge that a stage's config asks for, in this event loop."""
        if self._judge is not None:
            return self._judge
        options = isolated(ctx)
        key = (asyncio.get_running_loop(), ctx.run_dir, options.judge_url, options.max_unjudged, options.judging())
        if key not in self._judges:
            secret = None if ctx.run_dir is None else Secret.load_or_create(ctx.run_dir / SECRET)
            self._judges[key] = Patient(make_judge(options, secret), options.max_unjudged)
        return self._judges[key]

    async def aclose(self) -> None:
        """End every judge that was opened here."""
        judges, self._judges = list(self._judges.values()), {}
        self._records.clear()
        await asyncio.gather(*(judge.aclose() for judge in judges))

    async def _write(self, run_dir: Path, problem: KernelProblem, turns: list[dict[str, Any]]) -> None:
        """Add to the run's file; a disk that is full costs the lines, and not the run: the ledger has them too."""
        async with self._writing:
            try:
                if run_dir not in self._records:
                    self._records[run_dir] = await asyncio.to_thread(Records, run_dir)
                self._records[run_dir].name(problem)
                await asyncio.to_thread(self._records[run_dir].add, turns)
            except OSError as error:
                self._records.pop(run_dir, None)
                message = f"turns are not written to {run_dir / FILE}: {error.strerror}"
                notice(("kernelbench", "records"), message)

    async def _judge_foreign(self, sample: Sample, group: Group, ctx: Context) -> None:
        """Judge what another generate function made, as a dialogue of one turn."""
        extraction = extract(sample.response)
        problem = replace(problem_of(group), occasion=occasion(ctx, 0))
        verdict = await judged(extraction, problem, self.judge(ctx), ctx.options.judge_retries)
        sample.metadata[TURN] = {
            **{"turn": 0, "turns": 1, "ended": "turns", "finish": "stop", "sees": [], "feedback": ""},
            **{"source": extraction.source, "verdict": verdict_to_json(verdict)},
            "seconds": {"generate": 0.0, "judge": sum(verdict.seconds.values())},
        }


def isolated(ctx: Context) -> Options:
    """The plugin's options with the isolation that the run's config asks for."""
    section = ctx.config.reward
    update = {"sandbox": section.sandbox_level, "i_trust_this_code": section.i_trust_this_code}
    options: Options = ctx.options.model_copy(update=update)
    return options


def make_judge(options: Options, secret: Secret | None = None) -> Judge:
    """The judge that the options name: a service's, which has a secret of its own, or one in this process."""
    if options.judge_url:
        from slime_kernelbench.service.client import connect

        return connect(options)
    from slime_kernelbench.judge import LocalJudge

    return LocalJudge(options.judging(), secret=secret)


def prompts(task: str, ctx: Context) -> PromptSource:
    """The rows of a task: of problems (`problems.prompts`), or of the embedded default (`warmup.tasks`).

    Raises:
        ConfigError: CFG05 no such task, CFG04 a reward setting that would undo the returns, or as `load_words`.
        DataError: as `problems.load`.
    """
    check_reward_section(ctx)
    options: Options = ctx.options
    words, chat = words_of(options.prompt_template), ctx.config.data.apply_chat_template

    def render(problem: KernelProblem) -> Any:
        return words.prompt(problem, chat=chat)

    if task.startswith(FAMILY):
        from slime_kernelbench.warmup.tasks import family_rows

        def feedback(verdict: Verdict) -> str:
            return tell(verdict, attempt=1, options=options, words=words, tokenizer=ctx.tokenizer)

        speech = speech_of(ctx, words, messages=chat)
        return family_rows(task, ctx, render=render, speech=speech, words=words, tell=feedback)
    return rows_of(task, options.problems, heldout=options.heldout, seed=options.split_seed, render=render)


def check_reward_section(ctx: Context) -> None:
    """Refuse core settings that replace a turn's return.

    Raises:
        ConfigError: CFG04.
    """
    if ctx.config.reward.reward_weights:
        raise ConfigError(
            "reward_weights is set, and kernelbench's rewards are returns over turns",
            code="CFG04",
            where="reward.reward_weights",
            why="weights of terms would replace a turn's return by its own terms",
            fix="plugin.kernelbench.correct_weight, speed_weight, ... weigh the terms of a turn",
        )


@cache
def words_of(path: str) -> Words:
    """`load_words`, once a file."""
    return load_words(path)
