"""A run's metrics, drops, times, evaluations and samples, for people and for `--json`."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slime_core.errors import StorageError
from slime_core.report.rundir import RunDir

HIGHER = ("reward/", "raw_reward/", "task/", "eval/")
LOWER = ("loss", "kl", "truncated_ratio", "failed_ratio", "train_rollout_logprob_abs_diff", "dropped/")
"""Beginnings of metric names that have a good direction; the others have no best."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file, one a line; a last line that a crash cut short is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def complete(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A line of ``metrics.jsonl`` on a step or an evaluation, with an empty table for one that it lacks; else None."""
    tables = {name: row.get(name) or {} for name in ("metrics", "seconds")}
    named = row.get("kind") == "step" or (row.get("kind") == "eval" and isinstance(row.get("name"), str))
    sound = named and isinstance(row.get("version"), int) and all(isinstance(table, dict) for table in tables.values())
    return {**row, **tables} if sound else None


def steps_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """The step lines of ``metrics.jsonl``; of a version written twice, the later one."""
    return steps_among(figures_among(read_lines(run_dir.metrics)))


def evaluations_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """The evaluation lines of ``metrics.jsonl``, as they were written; of one written twice, the later."""
    return evaluations_among(figures_among(read_lines(run_dir.metrics)))


def figures_among(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those lines of ``metrics.jsonl`` that are complete rows of steps and evaluations."""
    return [row for line in lines if (row := complete(line))]


def steps_among(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of steps by version; of a version written twice, the later one."""
    steps = {row["version"]: row for row in rows if row["kind"] == "step"}
    return [steps[version] for version in sorted(steps)]


def evaluations_among(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of evaluations; of a set written twice for a version, the later one."""
    return list({(row["version"], row["name"]): row for row in rows if row["kind"] == "eval"}.values())


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Metric name to ``first``, ``last`` and ``best`` over some steps; best is None where no direction is good."""
    names = dict.fromkeys(name for step in steps for name in step["metrics"])
    table: dict[str, dict[str, float | None]] = {}
    for name in sorted(names):
        values = [value for step in steps if (value := step["metrics"].get(name)) is not None]
        if values:
            table[name] = {"first": values[0], "last": values[-1], "best": best(name, values)}
    return table


def best(name: str, values: Sequence[float]) -> float | None:
    """The highest of rewards, the lowest of losses; None for the rest."""
    if name.startswith(HIGHER):
        return max(values)
    return min(values) if name.startswith(LOWER) or name.endswith("/loss") else None


def times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by part, summed over steps."""
    parts = dict.fromkeys(name for step in steps for name in step.get("seconds", {}))
    return {name: sum(step["seconds"].get(name) or 0.0 for step in steps) for name in parts}


def tokens_per_second(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Response tokens of all steps by the seconds of all their parts."""
    seconds = sum(times(steps).values())
    tokens = sum(step["metrics"].get("tokens/response") or 0.0 for step in steps)
    return tokens / seconds if seconds else None


def states(run_dir: RunDir) -> dict[str, int]:
    """Samples by state, as the ledger counts them: ``issued trained pending``, ``dropped/REASON``; or nothing.

    ``pending`` is generated and not yet trained, as in `Ledger.counts`.
    """
    query = "SELECT t.state, coalesce(r.name, ''), t.count FROM tally t LEFT JOIN reasons r ON r.id = t.reason"
    try:
        with closing(open_ledger(run_dir)) as database:
            rows = database.execute(query).fetchall()
    except sqlite3.Error:
        return {}
    counts = {"issued": sum(count for *_, count in rows), "trained": 0, "pending": 0}
    for state, reason, count in rows:
        if count:
            name = ("pending", "pending", "trained", f"dropped/{reason}")[state]
            counts[name] = counts.get(name, 0) + count
    return counts


def recorded_steps(run_dir: RunDir) -> int:
    """Steps whose composition is in the ledger; 0 for none."""
    try:
        with closing(open_ledger(run_dir)) as database:
            return int(database.execute("SELECT count(*) FROM steps").fetchone()[0])
    except sqlite3.Error:
        return 0


def open_ledger(run_dir: RunDir) -> sqlite3.Connection:
    """The database, to read, wherever it lies (:func:`ledger_of`); sqlite3.Error where there is none."""
    return read_only(run_dir, ledger_of(run_dir))


def read_only(run_dir: RunDir, ledger: Path) -> sqlite3.Connection:
    """A ledger of a run, to read. Where no process has the run, no files are made beside it: it may be read-only."""
    quiet = not ledger.with_name(f"{ledger.name}-wal").exists() and run_dir.holder() is None
    mode = "mode=ro&immutable=1" if quiet else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(ledger))}?{mode}", uri=True, timeout=10)


def ledger_of(run_dir: RunDir) -> Path:
    """The ledger's file, which may be in ``report.ledger_dir``; where that is not here, its newest copy."""
    elsewhere = ledger_dir(run_dir)
    if run_dir.ledger.exists() or not elsewhere:
        return run_dir.ledger
    from slime_core.ledger.repair import newest_copy
    from slime_core.ledger.schema import own_folder

    path = own_folder(run_dir.path, Path(elsewhere)) / run_dir.ledger.name
    if not path.exists():
        with suppress(StorageError):
            return newest_copy(run_dir.path)
    return path


def ledger_dir(run_dir: RunDir) -> str:
    """The run's ``report.ledger_dir``; empty where its config says nothing of it, or is no TOML."""
    try:
        folder = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))["report"]["ledger_dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return folder if isinstance(folder, str) else ""


def last_samples(run_dir: RunDir) -> list[dict[str, Any]]:
    """Best and worst samples of the last step that has any."""
    rows = [row for row in read_lines(run_dir.samples) if isinstance(row.get("version"), int)]
    version = max((row["version"] for row in rows), default=0)
    return [row for row in rows if row["version"] == version]
