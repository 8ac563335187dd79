"""Texts of the terminal's view: what a run's curves, samples, sentences and times look like at a size in characters.

Pure functions of a `RunFollower`; the terminal that shows them is `terminal`. Text of models is shown, never obeyed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.text import Text

from slime_core.report.progress import duration
from slime_core.report.text import safe_text
from slime_watch.curves import Points, curve
from slime_watch.follower import RECENT, RunFollower, wall

SMALLEST = (40, 12)  # columns and lines
TWO_COLUMNS = 72  # from this width on
PANEL = 5  # lines of a panel, at least
ROWS = 3  # of panels, at most
NOTES = 3  # newest sentences under the curves
LABEL = 8  # characters of a panel's axis
BAR = 20  # characters of a whole bar

MAIN = (
    ("reward", r"reward/mean"),
    ("evaluation", r"eval/.*"),
    ("length", r"response_len/mean"),
    ("entropy", r"entropy"),
    ("KL", r"kl|kl_loss|opd_reverse_kl|ppo_kl|kl_reward.*"),
    ("gradient norm", r"grad_norm"),
)
"""Panels of the first page: a label, and the metrics of which the first that has figures is drawn."""

Panel = tuple[str, Points]


@dataclass(slots=True, frozen=True, kw_only=True)
class ViewPage:
    """What of a view is shown: its size in characters, the page, and whether curves cover stages that are over."""

    width: int
    height: int
    number: int = 0
    everything: bool = False


def head(follower: RunFollower, width: int, now: float | None = None) -> Text:
    """Two lines: where the run is, and how fast."""
    steps, dropped = follower.steps, follower.dropped
    done, total = (steps[-1]["version"] if steps else 0), follower.total
    parts = [one_line(follower.run_dir.path.name), follower.status]
    if steps:
        parts.append(f"{one_line(str(steps[-1].get('stage', '')))} step {steps[-1]['step'] + 1}/{steps[-1]['of']}")
    if total:
        parts.append(f"{done}/{total} {bar(done / total, 10)} {done / total:.0%}")
    if follower.running:
        parts.append(f"eta {duration(follower.eta) if steps else '?'}")
    elif error := follower.info.get("error"):
        parts.append(one_line(str(error)))
    facts = []
    if follower.running:
        name, since = follower.phase
        at = time.time() if now is None else now
        facts.append(f"{one_line(name)} {duration(max(0.0, at - since))}" if name else "between parts")
    if steps:
        recent = steps[-RECENT:]
        facts += [f"{sum(map(wall, recent)) / len(recent):.3g} s/step", f"{follower.tokens_per_second:.0f} tok/s"]
    if follower.counts:
        reasons = ", ".join(f"{one_line(reason)} {count}" for reason, count in list(dropped.items())[:3])
        facts += [f"trained {follower.counts['trained']}", f"dropped {sum(dropped.values())}"]
        facts[-1] += f" ({reasons})" if reasons else ""
    first, second = (set_cell_size("  ".join(texts), width) for texts in (parts, facts))
    return Text.assemble((first, "bold"), "\n", (second, "dim"))


def panels(follower: RunFollower) -> list[Panel]:
    """Curves that have figures: those of `MAIN`, then every other metric by name."""
    series = {f"eval/{name}": points for name, points in follower.evaluations().items()}
    series |= {name: follower.series[name] for name in sorted(follower.series)}
    labels: dict[str, str] = {}
    for label, pattern in MAIN:
        if match := next((name for name in series if re.fullmatch(pattern, name)), None):
            labels[match] = label if label == match else f"{label} {match}"
    rest = [name for name in series if name not in labels]
    return [(labels.get(name, name), series[name]) for name in (*labels, *rest)]


def curves(follower: RunFollower, page: ViewPage) -> Text:
    """A page of panels, and the newest sentences of the run's log."""
    width, height = page.width, page.height
    first = 0 if page.everything else follower.stage_start
    series = [(name, points) for name, points in panels(follower) if points[-1][0] >= first]
    if not series:
        empty = Text("\n  no step is finished yet\n\n", "bold")
        return empty.append_text(sentences(follower, width, height - 3))
    news = sentences(follower, width, NOTES if height >= 3 * PANEL + NOTES else 0)
    room = height - min(NOTES, len(follower.notes)) if news else height
    columns, rows = (2 if width >= TWO_COLUMNS else 1), max(1, min(ROWS, room // PANEL))
    start = page.number % -(-len(series) // (rows * columns)) * rows * columns
    left, right = min(points[0][0] for _, points in series), max(points[-1][0] for _, points in series)
    blocks = [
        panel(
            title, [p for p in points if p[0] >= first], width // columns - 1, room // rows, (max(left, first), right)
        )
        for title, points in series[start : start + rows * columns]
    ]
    lines = [line for i in range(0, len(blocks), columns) for line in zip(*blocks[i : i + columns])]
    text = Text("\n").join(Text(" ").join(line) for line in lines)
    return Text("\n").join([text, news]) if news else text


def panel(title: str, points: Points, width: int, height: int, span: tuple[float, float]) -> list[Text]:
    """A title with the newest value, and the curve with its highest and lowest value beside it."""
    value = f"{points[-1][1]:.4g}"
    name = set_cell_size(one_line(title), max(1, width - len(value) - 1))
    values = [y for _, y in points]
    labels = [""] * (height - 1)
    if min(values) < max(values):
        labels[-1], labels[0] = f"{min(values):.3g}", f"{max(values):.3g}"
    dots = curve(points, width - LABEL - 1, height - 1, span)
    rows = [Text.assemble((f"{label:>{LABEL}} ", "dim"), (row, "green")) for label, row in zip(labels, dots)]
    return [Text.assemble((name, "cyan"), " ", (value, "bold")), *rows]


def sentences(follower: RunFollower, width: int, count: int) -> Text:
    """The newest lines of log/run.log, each cut to a line."""
    chosen = list(follower.notes)[-count:] if count > 0 else []
    lines = [set_cell_size(one_line(note).replace("T", " ", 1), width).rstrip() for note in chosen]
    return Text("\n".join(lines), "dim")


def notes(follower: RunFollower, page: ViewPage) -> Text:
    """Every sentence that is kept, the newest first."""
    lines = [one_line(note).replace("T", " ", 1) for note in reversed(follower.notes)]
    return Text("\n".join(lines) or "\n  the run has said nothing yet")


def samples(follower: RunFollower, page: ViewPage) -> Text:
    """Best and worst samples of a step; pages count steps back from the newest."""
    versions = sorted({row["version"] for row in follower.samples}, reverse=True)
    if not versions:
        return Text("\n  no samples are kept yet (report.save_samples)")
    place = page.number % len(versions)
    version = versions[place]
    text = Text(f"step {version}   {place + 1} of {len(versions)}\n")
    for row in (row for row in follower.samples if row["version"] == version):
        terms = ", ".join(f"{name} {value}" for name, value in (row.get("terms") or {}).items())
        ended = f"{row.get('status')} after {row.get('response_length')} tokens"
        title = f"{row.get('rank')} {row.get('id')}: reward {row.get('reward')}"
        text.append("\n" + one_line(title), "bold").append(one_line(f"   {ended}  {terms}") + "\n", "dim")
        for name in ("prompt", "response", "label"):
            text.append(f"{name:>8}  ", "cyan").append(indented(str(row.get(name))) + "\n")
    return text


def indented(text: str) -> str:
    """Text whose further lines begin below its first."""
    return safe_text(text).replace("\n", "\n" + " " * 10)


def one_line(text: str) -> str:
    """A name or a sentence of anybody's on one line."""
    return safe_text(text).replace("\n", " ").replace("\t", " ")


def times(follower: RunFollower, page: ViewPage) -> Text:
    """Seconds by part over the last ten steps and over all, states of samples, evaluations."""
    text = Text()
    for label, last in (
        (f"last {min(RECENT, len(follower.steps))} steps", RECENT),
        ("whole run", len(follower.steps)),
    ):
        parts = follower.seconds(last) if follower.steps else {}
        total = sum(parts.values()) or 1.0
        text.append(f"time, {label}\n", "bold")
        for name, seconds in parts.items():
            share = seconds / total
            text.append(f"  {one_line(name):<14.14} {seconds:>9.1f} s {share:>5.0%} ").append(
                bar(share, BAR) + "\n", "green"
            )
    text.append("samples\n", "bold")
    for name, count in follower.counts.items():
        text.append(f"  {one_line(name):<24.24} {count:>9}\n")
    for name, points in follower.evaluations().items():
        text.append(f"evaluation {one_line(name)}\n", "bold")
        for at, value in points[-5:]:
            text.append(f"  step {at:<8.0f} reward {value:.4g}\n")
    return text


def bar(share: float, width: int) -> str:
    """A bar that is full at a share of 1."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


KEYS = """
  1 2 3 4     curves, samples, notes, times
  ← →  p n    curves: other metrics; samples: earlier and later steps
  a           curves of the stage that runs, or of all stages
  ↑ ↓         scroll
  ?           this list
  q           leave; the run continues
"""


def keys(follower: RunFollower, page: ViewPage) -> Text:
    """What the keys do."""
    return Text(KEYS)


def too_small(width: int, height: int) -> Text:
    """What is shown where nothing has room."""
    columns, lines = SMALLEST
    return Text(f"{width}x{height} is too small: make the terminal {columns}x{lines} or larger")


VIEWS: dict[str, Callable[[RunFollower, ViewPage], Text]] = {
    "curves": curves,
    "samples": samples,
    "notes": notes,
    "times": times,
    "keys": keys,
}
