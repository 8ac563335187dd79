"""Rewards of a group's judged dialogues: terms, the turn's own reward, and its return, which trains.

Judging is over when this is called: verdicts lie in the samples. A sample that another function generated has none;
its answer is judged here, once, as a dialogue of one turn.

A turn whose return is unknown (nothing could be judged in it, or in a turn that its return holds) is an infrastructure
error: it is dropped with its reason, never scored 0. In an evaluation a turn's value is the best reward so far, so
that the last turn has what the dialogue came to.

Terms of a Reward, which the core reports as means (``reward/TERM/mean``), and again for each turn as ``turnK_TERM``:
`reward.TERMS`, ``own`` (the turn's reward), ``hack``, ``speedup`` where it was measured, ``seconds_STAGE``. The last
turn of a dialogue has ``solved`` (1 where any turn is right) and ``turns`` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from slime_core import Group, Reward, Sample
from slime_kernelbench.codec import verdict_from_json
from slime_kernelbench.dialogue.returns import padded, returns
from slime_kernelbench.dialogue.turns import TURN, turn_of
from slime_kernelbench.reward import Worth, worth
from slime_kernelbench.types import Verdict

if TYPE_CHECKING:
    from slime_kernelbench.options import Options

BY_TURN = ("compiled", "correct", "own", "hack", "speedup")


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoredTurn:
    """One turn of a dialogue with everything that was found out about it."""

    place: int  # in the group's samples
    sample: Sample
    turn: dict[str, Any]  # `turns.turn_of`
    verdict: Verdict
    worth: Worth
    total: float | None  # the return; None where it is unknown
    reward: Reward


def score_group(group: Group, options: Options, *, evaluation: bool = False) -> list[ScoredTurn]:
    """Every turn of a group, in the order of its samples, which all have been judged.

    With ``reward_tier = auto``, where the speed of any right answer of the group was measured, one without a time
    could not be judged: it would compete with less than it is worth.
    """
    scores: list[ScoredTurn] = []
    if options.reward_tier == "auto" and any(_timed(sample) for sample in group.samples):
        options = options.model_copy(update={"reward_tier": "speed"})
    for places in group.rollouts.values():
        scores += _dialogue([(place, group.samples[place]) for place in places], options, evaluation)
    return sorted(scores, key=lambda scored: scored.place)


def so_far(values: Sequence[float | None]) -> list[float | None]:
    """The best value up to each turn; None from the first that is unknown on.

    Example: so_far([0.1, 1.0, 0.0]) == [0.1, 1.0, 1.0]
    """
    return list(accumulate(values, lambda best, value: None if best is None or value is None else max(best, value)))


def _timed(sample: Sample) -> bool:
    turn = turn_of(sample)
    return turn is not None and turn["verdict"]["status"] == "correct" and turn["verdict"]["timing"] is not None


def _dialogue(samples: Sequence[tuple[int, Sample]], options: Options, evaluation: bool) -> list[ScoredTurn]:
    turns = [(place, sample, turn) for place, sample in samples if (turn := turn_of(sample)) is not None]
    turns.sort(key=lambda item: item[2]["turn"])
    verdicts = [verdict_from_json(turn["verdict"]) for _, _, turn in turns]
    worths = [worth(verdict, options) for verdict in verdicts]
    values = [value.value for value in worths]
    length = max(options.max_turns, len(values)) if options.early_end == "repeat" else 0
    totals = so_far(values) if evaluation else returns(values, options.return_mode, options.gamma, length)
    solved = any(verdict.correct and not verdict.flags for verdict in verdicts)
    peers = padded(values, options.return_mode, options.gamma, max(options.max_turns, len(values)))
    scored = []
    for (place, sample, turn), verdict, value, total in zip(turns, verdicts, worths, totals, strict=True):
        if options.ragged == "padded" and None not in peers:
            sample.train_metadata[TURN] = {"turn": turn["turn"], "returns": peers}
        last = {"solved": float(solved), "turns": float(len(turns))} if turn is turns[-1][2] else {}
        reward = _reward(value, total, verdict, turn, last)
        scored.append(
            ScoredTurn(place=place, sample=sample, turn=turn, verdict=verdict, worth=value, total=total, reward=reward)
        )
    return scored


def _reward(
    worth: Worth, total: float | None, verdict: Verdict, turn: dict[str, Any], last: dict[str, float]
) -> Reward:
    if total is None:
        reason = worth.reason or ("the engine gave it up" if turn["finish"] == "abort" else "")
        return Reward(value=0.0, kind="infra_error", reason=reason or "a later turn could not be judged")
    terms = {**worth.terms, "hack": float(verdict.status == "hack" or bool(verdict.flags)), **last}
    if worth.value is not None:
        terms["own"] = worth.value
    if verdict.timing is not None and verdict.correct:
        terms["speedup"] = verdict.timing.speedup
    terms |= {f"turn{turn['turn'] + 1}_{name}": terms[name] for name in BY_TURN if name in terms}
    seconds = {**verdict.seconds, **{name: turn["seconds"][name] for name in ("generate", "judge")}}
    terms |= {f"seconds_{name}": float(value) for name, value in seconds.items()}
    failed = verdict.status in ("rejected", "compile_error", "runtime_error", "timeout", "hack")
    return Reward(value=total, kind="failed" if failed else "score", terms=terms)
