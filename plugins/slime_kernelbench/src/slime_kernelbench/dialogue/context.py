"""Which earlier attempts the next turn sees, and the token ids of its prompt.

    prompt | answer 0 | between 0 | answer 1 | between 1 | (the next answer)          full
    prompt                        | answer 1 | between 1 |                            last, context_turns = 1
    prompt | answer 0 | between 0             | ...                                   best_last: the best and the last
    prompt with code and results of attempts 0, 1 before its question                 history

These are put together without encoding anything; only a history is a new prompt, rendered as the first one was. With
``reasoning = drop`` an earlier answer is there without its reasoning, and its header is the template's for past
answers. The prompt that the engine reads is the prompt that is trained on: a turn's sample holds these very ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slime_core import Sample
from slime_core.data.chat import encode, render
from slime_core.data.turns import Speech, unspecial
from slime_core.types import Message
from slime_kernelbench.dialogue.words import Words, put
from slime_kernelbench.types import Verdict

Policy = Literal["full", "last", "best_last", "history"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One turn: what was sampled, what the judge said of it, and what the model was told."""

    turn: int  # from 0
    sample: Sample
    verdict: Verdict
    value: float | None = None  # reward of the turn; None where nothing could be judged
    source: str | None = None
    sees: tuple[int, ...] = ()  # earlier turns in its prompt
    feedback: str = ""
    between: list[int] = field(default_factory=list)  # ids that follow the answer as it is seen later
    finish: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def answer(self) -> list[int]:
        """The ids that were sampled."""
        return self.sample.response_tokens


def visible_turns(attempts: Sequence[Attempt], policy: Policy, turns: int) -> list[int]:
    """Turns that the next one sees, in order; of equally good ones the first is the best."""
    numbers = list(range(len(attempts)))
    if policy in ("full", "history"):
        return numbers
    if policy == "last":
        return numbers[-turns:]
    best = max(attempts, key=lambda a: (float("-inf") if a.value is None else a.value, -a.turn)).turn
    return sorted({best, numbers[-1]})


def shown(attempt: Attempt, speech: Speech, *, drop: bool) -> list[int]:
    """An attempt's answer as later turns see it."""
    return speech.visible(attempt.answer) if drop else attempt.answer


def prompt_of(
    first: Sequence[int], attempts: Sequence[Attempt], turns: Sequence[int], speech: Speech, *, drop: bool
) -> list[int]:
    """The next turn's prompt: the first one's ids, then each seen attempt's and those between."""
    tokens = list(first)
    for turn in turns:
        if drop:
            coming, past = speech.header
            if coming and tokens[-len(coming) :] == coming:
                del tokens[-len(coming) :]
            tokens += past
        tokens += shown(attempts[turn], speech, drop=drop)
        tokens += attempts[turn].between
    return tokens


def history_prompt(
    prompt: str | list[Message], blocks: Sequence[str], number: int, speech: Speech, words: Words
) -> list[int]:
    """Ids of the first prompt with earlier attempts before its question (``words.history``).

    Args:
        blocks: a text an attempt, as `Words.block` writes it
        number: of the attempt that is asked for, from 1
    """

    def question(text: str) -> str:
        attempts = unspecial("\n\n".join(blocks), speech.tokenizer)
        return put(words.history, attempts=attempts, number=str(number), question=text)

    if isinstance(prompt, str):
        prompt = question(prompt)
    else:
        user = next(place for place, message in enumerate(prompt) if message["role"] == "user")
        message = {**prompt[user], "content": question(prompt[user]["content"])}
        prompt = [*prompt[:user], message, *prompt[user + 1 :]]
    where = "a history of attempts"
    text = render(prompt, speech.tokenizer, template=speech.template, where=where, kwargs=speech.kwargs)
    return encode(speech.tokenizer, text)


def fitted(
    attempts: Sequence[Attempt],
    policy: Policy,
    prompt: Callable[[Sequence[int]], list[int]],
    *,
    turns: int,
    room: int,
) -> tuple[list[int], tuple[int, ...]] | None:
    """The next prompt and the turns in it; the oldest leave until it has at most ``room`` tokens (0: no limit).

    ``prompt`` makes it of turns. None where not even the last attempt fits.
    """
    chosen = visible_turns(attempts, policy, turns)
    while chosen:
        tokens = prompt(chosen)
        if not room or len(tokens) <= room:
            return tokens, tuple(chosen)
        chosen = chosen[1:]
    return None
