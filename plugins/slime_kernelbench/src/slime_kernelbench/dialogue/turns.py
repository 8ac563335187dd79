"""Dialogues of a group of pending samples: a turn a sample, siblings of one rollout.

    sample -> ctx.generate -> extract -> judge -> worth -> ended? -> feedback -> ids between -> next prompt -> sample
                                |   (a source once)          |
                                `- no code: refused          `- success, repeated, budget, context, turns, aborted

A turn's sample is the prompt that the engine read and the answer that it gave, id by id. The first turn is the sample
that was issued; turn k is its sibling ``ID.k`` under the same ``rollout_id``. What the judge said and what a turn is
worth lie in ``metadata["kernelbench"]`` (:func:`turn_of`); `scoring` makes returns of them, and judges nothing again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_core import Context, DataError, EngineError, Group, Sample, SamplingParams, Status
from slime_core.data.turns import Speech
from slime_core.plugins.boundary import together
from slime_core.rollout.groups import sibling
from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.dialogue import feedback
from slime_kernelbench.dialogue.context import Attempt, fitted, history_prompt, prompt_of, shown
from slime_kernelbench.dialogue.extract import Extraction, extract
from slime_kernelbench.dialogue.words import Words
from slime_kernelbench.problems.rows import of_row
from slime_kernelbench.reward import worth
from slime_kernelbench.types import Diagnostic, Judge, KernelProblem, Verdict

if TYPE_CHECKING:
    from slime_kernelbench.options import Options

TURN = "kernelbench"
"""Key of a sample's metadata, and of its ``train_metadata``."""
NOTHING = Verdict(status="infra", reached="static")


@dataclass(slots=True, frozen=True, kw_only=True)
class Room:
    """What the dialogues of a run share."""

    ctx: Context
    options: Options
    judge: Judge
    words: Words
    speech: Speech

    @classmethod
    def of(cls, ctx: Context, judge: Judge, words: Words, *, messages: bool) -> Room:
        """The room of a group whose prompt was ``messages``, or a text."""
        speech = speech_of(ctx, words, messages=messages)
        return cls(ctx=ctx, options=ctx.options, judge=judge, words=words, speech=speech)

    @property
    def drops(self) -> bool:
        """Whether reasoning leaves the context."""
        return self.options.reasoning == "drop"

    def params(self, spent: int) -> SamplingParams:
        """Sampling parameters of a turn, after ``spent`` tokens."""
        params = self.ctx.sampling
        if params is None:
            raise RuntimeError("the context has no sampling parameters")
        if not self.options.token_budget:
            return params
        return replace(params, max_new_tokens=min(params.max_new_tokens, self.options.token_budget - spent))

    def prompt_room(self, spent: int) -> int:
        """Tokens that a prompt may have so that an answer fits; 0 where the config sets no limit."""
        limit = self.ctx.config.rollout.rollout_max_context_len
        return max(limit - self.params(spent).max_new_tokens, 1) if limit else 0


def speech_of(ctx: Context, words: Words, *, messages: bool) -> Speech:
    """How a run puts words between answers; ``messages``: its prompts are such, and not texts."""
    data = ctx.config.data
    return Speech(
        ctx.tokenizer,
        template=data.apply_chat_template or messages,
        kwargs=dict(data.apply_chat_template_kwargs),
        plain=words.between,
    )


async def generate_group(group: Group, room: Room) -> Group:
    """Fill a group's pending samples with dialogues; siblings come after the samples that were issued.

    Raises:
        DataError: DAT18 the prompt names no problem.
        EngineError: a turn that the engine could not serve; nothing of the group is kept.
    """
    problem = problem_of(group)
    issued = [(name, group.samples[places[0]]) for name, places in group.rollouts.items()]
    waiting = [(name, s) for name, s in issued if s.status in (Status.PENDING, Status.ABORTED)]
    dialogues = await together(converse(sample, problem, room) for _, sample in waiting)
    for (name, _), attempts in zip(waiting, dialogues, strict=True):
        for attempt in attempts[1:]:
            group.rollouts[name].append(len(group.samples))
            group.samples.append(attempt.sample)
    return group


async def converse(issued: Sample, problem: KernelProblem, room: Room) -> list[Attempt]:
    """One dialogue, turn after turn, until something ends it; its samples are annotated and final."""
    first, attempts, spent, sees = issued.tokens[: issued.prompt_length], list[Attempt](), 0, tuple[int, ...]()
    sample = issued

    def prompt(turns: Sequence[int]) -> list[int]:
        if room.options.context == "history":
            blocks = [room.words.block(turn + 1, attempts[turn].source, attempts[turn].feedback) for turn in turns]
            return history_prompt(issued.prompt, blocks, len(attempts) + 1, room.speech, room.words)
        return prompt_of(first, attempts, turns, room.speech, drop=room.drops)

    while True:
        began = time.monotonic()
        try:
            done = await room.ctx.generate(sample, room.params(spent), request_id=issued.id)
        except EngineError as error:
            if not error.ends_dialogue or not attempts:
                raise
            ended = "context"
            break
        spent += len(done.tokens)
        attempt = Attempt(turn=len(attempts), sample=sample, verdict=NOTHING, sees=sees, finish=done.finish)
        attempt.seconds["generate"] = time.monotonic() - began
        await _judge(attempt, attempts, problem, room)
        attempts.append(attempt)
        ended = why_ended(attempts, spent, room.options)
        if ended:
            break
        _answer(attempt, room)
        following = fitted(
            attempts, room.options.context, prompt, turns=room.options.context_turns, room=room.prompt_room(spent)
        )
        if following is None:
            ended = "context"
            break
        sees = following[1]
        sample = sibling(issued, len(attempts), following[0])
    _annotate(attempts, ended, problem)
    return attempts


def why_ended(attempts: Sequence[Attempt], spent: int, options: Options) -> str:
    """Why a dialogue is over after its last attempt; empty where it goes on.

    ``aborted`` and ``unjudged`` leave nothing to learn from; ``success``, ``repeated``, ``budget`` and ``turns`` are
    ends like any other (`returns`: what an early end is worth).
    """
    last = attempts[-1]
    if last.finish == "abort":
        return "aborted"
    if last.value is None:
        return "unjudged"
    if succeeded(last.verdict, options):
        return "success"
    if len(attempts) >= options.max_turns:
        return "turns"
    if options.stop_repeats and _repeats(attempts) >= options.stop_repeats:
        return "repeated"
    return "budget" if options.token_budget and spent >= options.token_budget else ""


def succeeded(verdict: Verdict, options: Options) -> bool:
    """Whether a verdict ends the dialogue: right, and where its speed was measured, fast enough."""
    if options.stop_on == "never" or not verdict.correct or verdict.flags:
        return False
    timing = None if options.reward_tier == "correctness" else verdict.timing
    if options.stop_on == "correct" or timing is None:
        return options.stop_on != "speed"
    return timing.speedup >= options.stop_speedup


def problem_of(group: Group) -> KernelProblem:
    """The problem that a prompt names, or that a row of TritonForge's holds.

    Raises:
        DataError: DAT18 it names none, or as `of_row`.
    """
    prompt = group.prompt
    problem = prompt.metadata.get("problem")
    if isinstance(problem, dict) and {"id", "name", "source"} <= set(problem):
        return KernelProblem(**problem)
    if "problem_id" in prompt.metadata:  # a row of the core's: label and data.metadata_key = extra_info
        row = {"label": prompt.label, "extra_info": prompt.metadata}
        return of_row(row, prompt.where or group.id, otherwise=group.id)
    raise DataError(
        f"the prompt of group {group.id} names no problem",
        code="DAT18",
        where=group.prompt.where or group.id,
        why='a row has metadata = {"problem": {"id": ..., "name": ..., "source": ...}}',
        fix="plugin.kernelbench.problems = FILE in place of data.prompt_data, or with it --label-key label "
        "--metadata-key extra_info, where rows are TritonForge's",
    )


def occasion(ctx: Context, turn: int) -> str:
    """What a judge draws inputs anew for: what an answer of an earlier turn, or version, has seen helps no other."""
    return f"eval.{turn}" if ctx.evaluation else f"{ctx.version}.{turn}"


def turn_of(sample: Sample) -> dict[str, Any] | None:
    """What is known of a sample's turn, JSON-ready; None where it was generated elsewhere."""
    turn = sample.metadata.get(TURN)
    return turn if isinstance(turn, dict) else None


def unanswered(extraction: Extraction) -> Verdict:
    """The verdict on an answer without code: refused, and nothing was judged."""
    diagnostic = Diagnostic(stage="static", kind=feedback.NO_CODE, message=f"{extraction.why}.")
    return Verdict(status="rejected", reached="static", diagnostics=(diagnostic,))


async def judged(extraction: Extraction, problem: KernelProblem, judge: Judge, retries: int) -> Verdict:
    """The verdict on an answer; asked again where nothing could be judged."""
    if extraction.source is None:
        return unanswered(extraction)
    verdict = await judge.judge(extraction.source, problem)
    for _ in range(retries):
        if verdict.status != "infra":
            break
        verdict = await judge.judge(extraction.source, problem)
    return verdict


async def _judge(attempt: Attempt, before: Sequence[Attempt], problem: KernelProblem, room: Room) -> None:
    """Fill in what the judge says of an answer; code that this dialogue has tried before is not judged again."""
    began = time.monotonic()
    if attempt.finish != "abort":
        extraction = extract(room.speech.text(attempt.answer), reasoning_open=room.speech.reasoning_open)
        attempt.source = extraction.source
        twin = next((old for old in before if extraction.source is not None and old.source == extraction.source), None)
        if twin is None:
            question = replace(problem, occasion=occasion(room.ctx, attempt.turn))
            attempt.verdict = await judged(extraction, question, room.judge, room.options.judge_retries)
        else:
            attempt.verdict = replace(twin.verdict, cached=True, seconds={})
        attempt.value = worth(attempt.verdict, room.options).value
    attempt.seconds["judge"] = time.monotonic() - began


def _repeats(attempts: Sequence[Attempt]) -> int:
    """How often the last answer was given before it, in a row: the same code, or the same ids where there is none."""
    answers = [attempt.source if attempt.source is not None else tuple(attempt.answer) for attempt in attempts]
    return next((n for n, answer in enumerate(reversed(answers[:-1])) if answer != answers[-1]), len(answers) - 1)


def _answer(attempt: Attempt, room: Room) -> None:
    """Put the judge's words into tokens."""
    feedback_text = feedback.tell(
        attempt.verdict,
        attempt=attempt.turn + 1,
        options=room.options,
        words=room.words,
        tokenizer=room.ctx.tokenizer,
    )
    attempt.feedback = feedback_text
    if room.options.context != "history":
        attempt.between = room.speech.between(feedback_text, shown(attempt, room.speech, drop=room.drops))


def _annotate(attempts: Sequence[Attempt], ended: str, problem: KernelProblem) -> None:
    for attempt in attempts:
        sample = attempt.sample
        sample.metadata["problem"] = problem.id  # its source is the label's business, and the data's
        sample.metadata[TURN] = {
            "turn": attempt.turn,
            "turns": len(attempts),
            "ended": ended,
            "finish": attempt.finish,
            "sees": list(attempt.sees),
            "source": attempt.source,
            "verdict": verdict_to_json(attempt.verdict),
            "feedback": attempt.feedback,
            "seconds": attempt.seconds,
        }
        sample.train_metadata[TURN] = {"turn": attempt.turn}
