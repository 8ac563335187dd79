"""The turns of a run for a person: a table by turn, and dialogues with code and verdicts.

    slime kernelbench show runs/kernels-1                      the table, and the best dialogue
    slime kernelbench show runs/kernels-1 --dialogue main/17-3
    slime kernelbench show runs/kernels-1 --problem softmax --last 3
    slime kernelbench show runs/kernels-1 --json               a line a dialogue: {"summary": ...} comes first

Text of a model or of a data set is printed without control characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from slime_kernelbench.records import read

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Turn = dict[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class Dialogue:
    """The turns of one rollout, in order."""

    id: str  # of its first sample
    turns: tuple[Turn, ...]

    @property
    def solved(self) -> bool:
        """Whether any turn is right and honestly so."""
        return any(turn["terms"].get("correct", 0.0) > 0 for turn in self.turns)

    @property
    def best(self) -> float:
        """The highest reward of a turn; -inf where none could be judged."""
        return max((turn["reward"] for turn in self.turns if turn["reward"] is not None), default=float("-inf"))

    def to_json(self) -> dict[str, Any]:
        """With everything that is known of its turns."""
        first = self.turns[0]
        shared = {name: first[name] for name in ("group", "rollout", "problem", "stage", "task", "evaluation")}
        return {"id": self.id, "solved": self.solved, **shared, "turns": list(self.turns)}


def dialogues(turns: Sequence[Turn]) -> list[Dialogue]:
    """Turns of `records.read` by rollout, attempt and, in evaluations, version."""
    groups: dict[tuple[Any, ...], list[Turn]] = {}
    for turn in turns:
        name = str(turn["id"]).removesuffix(f".{turn['turn']}") if turn["turn"] else str(turn["id"])
        groups.setdefault((name, turn["attempt"], turn["version"] if turn["evaluation"] else -1), []).append(turn)
    dialogues = ((key[0], sorted(members, key=lambda turn: int(turn["turn"]))) for key, members in groups.items())
    return [Dialogue(id=name, turns=tuple(members)) for name, members in dialogues]


def by_turn(items: Sequence[Dialogue]) -> list[dict[str, Any]]:
    """A row a turn: how many dialogues reached it, and the shares of what was judged there."""
    rows = []
    for number in range(max((len(dialogue.turns) for dialogue in items), default=0)):
        turns = [dialogue.turns[number] for dialogue in items if len(dialogue.turns) > number]
        judged = [turn for turn in turns if turn["reward"] is not None]
        row: dict[str, Any] = {"turn": number + 1, "dialogues": len(turns), "unjudged": len(turns) - len(judged)}
        shares: dict[str, Callable[[Turn], float]] = {
            "compiled": lambda turn: turn["terms"].get("compiled", 0.0),
            "correct": lambda turn: turn["terms"].get("correct", 0.0),
            "hack": lambda turn: float(turn["verdict"]["status"] == "hack" or bool(turn["verdict"]["flags"])),
            "reward": lambda turn: turn["reward"],
            "answer_tokens": lambda turn: turn["answer_tokens"],
            "judge_seconds": lambda turn: turn["seconds"]["judge"],
        }
        row |= {name: _mean([float(share(turn)) for turn in judged]) for name, share in shares.items()}
        rows.append({**row, "speedup": _mean([speed for turn in judged if (speed := speedup(turn)) is not None])})
    return rows


def summary(rows: Sequence[Dialogue]) -> dict[str, Any]:
    """Figures of a run's dialogues; evaluations apart."""
    train = [dialogue for dialogue in rows if not dialogue.turns[0]["evaluation"]]
    evaluated = [dialogue for dialogue in rows if dialogue.turns[0]["evaluation"]]
    parts = {"training": train, "evaluation": evaluated}
    return {
        name: {
            "dialogues": len(members),
            "solved": _mean([float(dialogue.solved) for dialogue in members]),
            "ended": _counts(dialogue.turns[-1]["ended"] for dialogue in members),
            "statuses": _counts(turn["verdict"]["status"] for dialogue in members for turn in dialogue.turns),
            "by_turn": by_turn(members),
        }
        for name, members in parts.items()
        if members
    }


def speedup(turn: Turn) -> float | None:
    """Of a right answer whose speed was measured."""
    timing = turn["verdict"].get("timing")
    if not timing or turn["verdict"]["status"] != "correct":
        return None
    compiled = timing["compiled"]
    baseline = timing["eager"] if compiled is None else min(float(timing["eager"]), float(compiled))
    return float(baseline) / max(float(timing["candidate"]), float(timing["remeasured"]))


def render_summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines of :func:`summary`."""
    for name, part in report.items():
        yield f"{name}: {part['dialogues']} dialogues, {part['solved']:.1%} solved; ended by {_summary(part['ended'])}"
        yield f"verdicts: {_summary(part['statuses'])}"
        yield "  turn  dialogues  compiled  correct    hack  reward  speed-up  tokens  judge s"
        for row in part["by_turn"]:
            shares = "  ".join(f"{_share(row[key]):>7}" for key in ("compiled", "correct", "hack"))
            rest = f"{_number(row['reward'])}  {_number(row['speedup']):>8}  {_number(row['answer_tokens'])}"
            yield f"  {row['turn']:>4}  {row['dialogues']:>9}  {shares}  {rest}  {_number(row['judge_seconds'])}"


def render_dialogue(dialogue: Dialogue, *, prompts: bool = False) -> Iterator[str]:
    """Lines of one dialogue: each turn's answer, verdict, reward and feedback."""
    first = dialogue.turns[0]
    ended = dialogue.turns[-1]["ended"]
    yield f"== {dialogue.id}  problem {first['problem']}  {len(dialogue.turns)} turns, ended by {ended}"
    for turn in dialogue.turns:
        yield f"-- turn {turn['turn'] + 1}  {_outcome(turn)}"
        if prompts and turn["sees"]:
            yield f"   sees turns {', '.join(str(number + 1) for number in turn['sees'])}"
        yield from _indented(clean(turn["answer"]))
        if turn["feedback"]:
            yield "   told:"
            yield from _indented(clean(turn["feedback"]))


def clean(text: str) -> str:
    """Without control characters, so that no text writes to the terminal by itself."""
    return CONTROL.sub("", text)


def _outcome(turn: Turn) -> str:
    verdict = turn["verdict"]
    if turn["return"] is None:
        return f"masked: {clean(turn['reason'])}"
    parts = [verdict["status"], f"reward {turn['reward']:.3g}", f"return {turn['return']:.3g}"]
    speed = speedup(turn)
    parts += [f"{speed:.3g}x"] if speed is not None else []
    parts += [f"flags {', '.join(flag['rule'] for flag in verdict['flags'])}"] if verdict["flags"] else []
    parts += [f"{turn['prompt_tokens']}+{turn['answer_tokens']} tokens, by version {_told_versions(turn)}"]
    parts += [f"judged in {turn['seconds']['judge']:.2g} s{' (known)' if verdict['cached'] else ''}"]
    return clean("  ".join(parts))


def _told_versions(turn: Turn) -> str:
    return "-".join(str(version) for version in sorted({*turn["made_by"][:1], *turn["made_by"][-1:]})) or "?"


def _indented(text: str) -> Iterator[str]:
    yield from (f"   | {line}" for line in text.split("\n"))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counts(names: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _summary(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.3g'):>6}"


@click.command("show", epilog="Example: slime kernelbench show runs/kernels-0 --last 3")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--dialogue", "name", default="", metavar="ID", help="One dialogue, such as main/17-3.")
@click.option("--problem", default="", help="Dialogues about problems whose id holds this.")
@click.option("--last", type=click.IntRange(0), default=None, help="The last N dialogues, in place of the best.")
@click.option("--json", "as_json", is_flag=True, help="The summary, then a line a dialogue.")
def show(run: Path, name: str, problem: str, last: int | None, as_json: bool) -> None:
    """Show the dialogues of a run: a table by turn, and what was said and judged."""
    rows = dialogues(read(run))
    chosen = [d for d in rows if name in ("", d.id) and problem in d.turns[0]["problem"]]
    if last is not None:
        chosen = chosen[len(chosen) - last :] if last else []
    if as_json:
        click.echo(json.dumps({"summary": summary(rows)}))
        for dialogue in chosen:
            click.echo(json.dumps(dialogue.to_json()))
        return
    for line in render_summary(summary(rows)):
        click.echo(line)
    best = last is None and not name and not problem
    for dialogue in [max(chosen, key=lambda d: d.best)] if best and chosen else chosen:
        click.echo("\n" + "\n".join(render_dialogue(dialogue, prompts=True)))
