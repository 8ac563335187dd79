r"""`rm_type` names and their graders.

A name may carry the prefix ``boxed_``: then what stands in the last ``\boxed{}`` is graded, and a response without
one has failed. Names come from this table alone; a row that names anything else gets an error, and no row can name
code.

In an evaluation a grader also notes in a sample's metadata what it answered, "" for nothing: the votes of maj@k. Equal
answers have the same text.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core import ConfigError, Context, Reward, Sample, Status
from slime_core.errors import nearest
from slime_core.evaluation.questions import ANSWER
from slime_rm_math.graders import BOXED, choices, dapo, deepscaler, groups, instructions, judge, remote
from slime_rm_math.graders.answers import after_thought, canonical, label_text, last_boxed, tail
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.mixture import mixed
from slime_rm_math.graders.verdict import RIGHT, WRONG, GradingVerdict, failed, infra, reward_of, unparsable
from slime_rm_math.grading import exact_match

if TYPE_CHECKING:
    from slime_rm_math.options import Options

Grade = Callable[[Sample, str, bool, Context], Awaitable[Reward]]
"""``grade(sample, text, boxed, ctx)``: ``text`` is the response, or with ``boxed`` the content of its last box."""
Rule = Callable[[str, str, Context], Awaitable[GradingVerdict]]
"""``rule(answer, label, ctx)``."""
NO_BOX = "no \\boxed{} in it"
NO_LABEL = "the row has no label"
MARGIN = 2.0  # seconds of reward.reward_timeout that are kept for everything but waiting


class Graders:
    """Every `rm_type` of this plugin, and the workers that they share.

    Example:
        Graders().types()["math"]      # async (sample, ctx) -> Reward
    """

    def __init__(self) -> None:
        self._equal: dict[tuple[int, float, int], Equivalence] = {}
        self._grades: dict[str, Grade] = {
            "exact_match": self._exact_match,
            "math": self._math,
            "dapo": self._dapo,
            "deepscaler": self._deepscaler,
            "gpqa": self._gpqa,
            "f1": self._f1,
            "ifeval": self._ifeval,
            "ifbench": self._ifbench,
            "format": self._format,
            "remote_rm": self._remote,
            "llm_judge": self._judge,
        }

    def types(self) -> dict[str, Callable[[Sample, Context], Awaitable[Reward]]]:
        """What `slime_reward_types` registers: every name, with and without ``boxed_``, and ``mix``."""
        named = {name: self._named(name) for name in self._grades if name != "format"}
        return {**named, **{BOXED + name: self._named(BOXED + name) for name in named}, "mix": self.mix}

    async def grade(self, name: str, sample: Sample, ctx: Context) -> Reward:
        """One sample's reward by a name.

        Raises:
            ConfigError: CFG04 no such name here, or an option that it needs is not set.
        """
        if name == "mix":
            return await self.mix(sample, ctx)
        bare = name.removeprefix(BOXED)
        if bare not in self._grades:
            names = (*self._grades, *(BOXED + names for names in self._grades), "mix")
            raise ConfigError(
                f"rm_math has no reward type '{name}'",
                code="CFG04",
                where=_named_by(name, sample),
                why=f"it has {', '.join((*self._grades, 'mix'))}, and each with {BOXED} before it",
                fix=nearest(name, names) or 'a type of another plugin: [[data.tasks]] reward = "NAME"',
            )
        text = tail(sample.response)
        if name == bare:
            return await self._grades[bare](sample, text, False, ctx)
        box = last_boxed(text)
        if box is None:
            _note(sample, "", ctx)
            return failed(NO_BOX)
        return await self._grades[bare](sample, box, True, ctx)

    async def mix(self, sample: Sample, ctx: Context) -> Reward:
        """The weighed sum of the types that the option ``mix`` names; the answer is what the heaviest reads."""
        weights: Mapping[str, float] = ctx.options.mix
        _needed(bool(weights), "mix", "rm_type mix", 'plugin.rm_math.mix = { math = 1.0, "format" = 0.1 }')
        rewards = {
            name: await self.grade(name, sample, ctx) for name in sorted(weights, key=lambda n: abs(weights[n]))
        }
        return mixed({name: rewards[name] for name in weights}, weights)

    async def majority(self, samples: Sequence[Sample], ctx: Context) -> list[Reward]:
        """A group's rewards where the most frequent boxed answer is right; answers that are equal are one."""
        within, equal = _seconds(math.inf, ctx), self.equivalence(ctx)

        async def form(sample: Sample) -> str | None:
            box = last_boxed(tail(sample.response))
            return None if box is None else await equal.form(box, within=within)

        return groups.majority(await asyncio.gather(*map(form, samples)))

    def close(self) -> None:
        """End the workers."""
        for equal in self._equal.values():
            equal.close()

    def _named(self, name: str) -> Callable[[Sample, Context], Awaitable[Reward]]:
        async def graded(sample: Sample, ctx: Context) -> Reward:
            return await self.grade(name, sample, ctx)

        return graded

    def equivalence(self, ctx: Context) -> Equivalence:
        """The workers of a run's options."""
        options: Options = ctx.options
        limits = (options.grader_workers, options.grader_seconds, options.grader_memory_mb)
        if limits not in self._equal:  # a stage may have limits of its own
            self._equal[limits] = Equivalence(workers=limits[0], seconds=limits[1], memory_mb=limits[2])
        return self._equal[limits]

    async def _judged(self, answer: str | None, label: str, sample: Sample, ctx: Context, rule: Rule) -> Reward:
        """The reward of an answer by a rule; the answer is noted, a right one as the label."""
        if answer is None:
            _note(sample, "", ctx)
            return failed(NO_BOX)
        until = time.monotonic() + _seconds(math.inf, ctx)
        verdict = await rule(answer, label, ctx)
        if ctx.evaluation:
            form = self.equivalence(ctx).form
            reference = form_of_answer = await form(label, within=until - time.monotonic())
            if verdict.outcome != "right":
                form_of_answer = await form(answer, within=until - time.monotonic())
                form_of_answer = (
                    canonical(answer) if form_of_answer == reference else form_of_answer
                )  # equal in value, and not for this rule
            _note(sample, form_of_answer, ctx)
        return reward_of(verdict)

    async def _verdict(self, answer: str, label: str, ctx: Context) -> GradingVerdict:
        return await self.equivalence(ctx).verdict(answer, label, within=_seconds(math.inf, ctx))

    async def _exact_match(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        _note(sample, text.strip() if boxed or sample.status is Status.COMPLETED else "", ctx)
        if not boxed:
            return exact_match(sample)
        return Reward(value=float(text.strip() == str(sample.label).strip()))

    async def _math(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        label, answer = label_text(sample.label), text if boxed else last_boxed(text)
        if label is None:
            return infra(NO_LABEL)
        return await self._judged(answer, label, sample, ctx, self._verdict)

    async def _dapo(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        label, answer = label_text(sample.label), text[-dapo.LOOKED_AT :] if boxed else dapo.answer_of(text)
        if label is None:
            return infra(NO_LABEL)
        _note(sample, "" if answer is None else dapo.normal_form(answer), ctx)
        if answer is None:
            return failed('no "Answer:" in it', -1.0)
        return reward_of(RIGHT if dapo.is_right(answer, label) else WRONG, wrong=-1.0)

    async def _deepscaler(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        label, solution = label_text(sample.label), text if boxed else deepscaler.solution(text)
        if label is None:
            return infra(NO_LABEL)
        if solution is None:
            _note(sample, "", ctx)
            return failed("its chain of thought has no end")
        answer = solution if boxed else last_boxed(solution)
        return await self._judged(answer, label, sample, ctx, self._strictly)

    async def _strictly(self, answer: str, label: str, ctx: Context) -> GradingVerdict:
        if len(answer) > deepscaler.LONGEST:
            return unparsable(f"longer than {deepscaler.LONGEST} characters")
        pairs = deepscaler.pairs(answer, label)
        for element, reference in pairs or ():
            verdict = await self._verdict(element, reference, ctx)
            if verdict.outcome != "right":
                return verdict
        return WRONG if pairs is None else RIGHT

    async def _gpqa(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        _note(sample, choices.letter_of(text, sample.metadata) or "", ctx)
        return reward_of(choices.choice(text, sample.label, sample.metadata))

    async def _f1(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        label = label_text(sample.label)
        if label is None:
            return infra(NO_LABEL)
        _note(sample, choices.plain_text(text), ctx)
        value, precision, recall = choices.f1(text, label)
        return Reward(value=value, terms={"precision": precision, "recall": recall})

    async def _ifeval(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        return instructions.follow(after_thought(text), sample.metadata, loose=False)

    async def _ifbench(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        return instructions.follow(after_thought(text), sample.metadata, loose=True)

    async def _format(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        return Reward(value=float(boxed or last_boxed(after_thought(text)) is not None))

    async def _remote(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        options: Options = ctx.options
        _needed(
            bool(options.rm_url), "rm_url", "rm_type remote_rm", "plugin.rm_math.rm_url=http://127.0.0.1:8000/reward"
        )
        return await remote.remote_reward(
            sample,
            text if boxed else sample.response,
            url=options.rm_url,
            token=_token(options.rm_token_env, "rm_token_env"),
            seconds=_seconds(options.rm_seconds, ctx),
            retries=options.rm_retries,
            key=ctx.config.reward.reward_key,
        )

    async def _judge(self, sample: Sample, text: str, boxed: bool, ctx: Context) -> Reward:
        options: Options = ctx.options
        configured = bool(options.judge_url and options.judge_model)
        fix = "plugin.rm_math.judge_url=http://127.0.0.1:8000/v1\nplugin.rm_math.judge_model=NAME"
        _needed(configured, "judge_url or judge_model", "rm_type llm_judge", fix)
        return await judge.judged(
            sample,
            after_thought(text),
            url=options.judge_url,
            model=options.judge_model,
            token=_token(options.judge_token_env, "judge_token_env"),
            seconds=_seconds(options.judge_seconds, ctx),
            retries=options.judge_retries,
            instruction=options.judge_instruction,
        )


def _named_by(name: str, sample: Sample) -> str:
    """The key, or the row, that names a type."""
    row = sample.metadata.get("row_id") or sample.id
    return f"metadata.rm_type of {row}" if sample.metadata.get("rm_type") == name else "reward.rm_type"


def _note(sample: Sample, answer: str, ctx: Context) -> None:
    if ctx.evaluation:
        sample.metadata[ANSWER] = answer


def _seconds(requested: float, ctx: Context) -> float:
    """A deadline that ends before the run's own does."""
    limit = ctx.config.reward.reward_timeout
    return min(requested, max(limit - MARGIN, limit / 2))


def _token(variable: str, option: str) -> str:
    _needed(
        not variable or bool(os.environ.get(variable)), variable, f"plugin.rm_math.{option}", f"export {variable}=..."
    )
    return os.environ[variable] if variable else ""


def _needed(configured: bool, setting: str, user: str, fix: str) -> None:
    if not configured:
        raise ConfigError(f"{user} needs {setting}, which is not set", code="CFG04", where="plugin.rm_math", fix=fix)
