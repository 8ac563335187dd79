"""A run directory in, everything that is wrong with it out: nothing lost, nothing doubled, nothing left lying about.

Read with SQL and plain files, not with the code that wrote them. Call it in a process of its own, or after the run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import StorageError
from slime_core.ledger.schema import DROPPED, FINISHED, PENDING, STATES, TRAINED
from slime_core.ledger.segments import RecordPlace, Segments

SAMPLE_ID = re.compile(r"(?P<stage>.+)/(?P<position>\d+)-(?P<rollout>\d+)(\.\d+)?")
TORCH_DIST = ".metadata"  # the index of a torch_dist folder has this name
LEFT = re.compile(r"(^\.|\.tmp$|^tmp|^corrupt-)")


@dataclass(slots=True)
class Audit:
    """What a run directory holds, in a form that two runs can be compared by."""

    steps: dict[int, list[str]] = field(default_factory=dict)  # version -> ordered sample ids that trained
    fingerprints: dict[int, str] = field(default_factory=dict)  # version -> checksum of the weights it made
    counts: dict[str, int] = field(default_factory=dict)  # rows by state; dropped ones as dropped/REASON
    metrics: dict[int, dict[str, float]] = field(
        default_factory=dict
    )  # version -> its line, without times and ledger/ (of the moment)
    evaluations: list[tuple[str, int]] = field(default_factory=list)  # (set, version) of each line
    final: dict[str, str] = field(default_factory=dict)  # file of final/ -> sha256
    wrong: list[str] = field(default_factory=list)


def audit(run_dir: Path, *, ended: bool = True, ledger: Path | None = None) -> Audit:
    """Read a run that nobody writes to now; ``ended`` says that it came to its end, so that nothing may be open."""
    found = Audit()
    with sqlite3.connect(ledger or run_dir / "ledger.sqlite") as db:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            _states(db, found, ended)
            _steps(db, found, ended)
            _positions(db, found)
            _payloads(db, run_dir / "segments", found)
        elif ended:
            found.wrong.append("the ledger is empty")  # a run that was killed before it had one is none
    db.close()
    if ended:
        _lines(run_dir, found)
        _leftovers(run_dir, found)
        found.final = hashes(run_dir / "final")
        if not found.final:
            found.wrong.append("there is no final/")
    return found


def differences(one: Audit, two: Audit, ignoring: tuple[str, ...] = ()) -> list[str]:
    """How the second run differs from the first, of those that must end bit for bit in the same weights.

    Metrics that begin with one of ``ignoring`` may differ.
    """
    wrong = []
    for name in ("steps", "fingerprints", "counts", "evaluations", "final"):
        mine, other = getattr(one, name), getattr(two, name)
        if mine != other:
            wrong.append(f"{name}: {_first_difference(mine, other)}")
    figures = [
        {step: {k: v for k, v in row.items() if not k.startswith(ignoring)} for step, row in found.metrics.items()}
        for found in (one, two)
    ]
    if figures[0] != figures[1]:
        wrong.append(f"metrics: {_first_difference(*figures)}")
    return wrong


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _states(db: sqlite3.Connection, found: Audit, ended: bool) -> None:
    (sound,) = db.execute("PRAGMA integrity_check").fetchone()
    if sound != "ok":
        found.wrong.append(f"SQLite: {sound}")
    rows = db.execute(
        "SELECT state, name, count(*) FROM samples LEFT JOIN reasons ON reasons.id = samples.reason GROUP BY 1, 2"
    ).fetchall()
    for state, reason, count in rows:
        found.counts[f"dropped/{reason}" if state == DROPPED else STATES[state]] = count
    found.counts["issued"] = sum(count for *_, count in rows)
    tally = dict(db.execute("SELECT state, sum(count) FROM tally GROUP BY 1"))
    by_state: Counter[int] = Counter()
    for state, _, count in rows:
        by_state[state] += count
    if {s: n for s, n in tally.items() if n} != dict(by_state):
        found.wrong.append(f"the tally says {tally}, the rows {dict(by_state)}")
    several = db.execute(
        "SELECT id, count(*) FROM samples WHERE state != ? GROUP BY id HAVING count(*) > 1", (DROPPED,)
    ).fetchall()
    if several:
        found.wrong.append(f"samples with two living attempts: {several[:5]}")
    if ended:
        still = db.execute("SELECT id, state FROM samples WHERE state IN (?, ?)", (PENDING, FINISHED)).fetchall()
        if still:
            found.wrong.append(f"{len(still)} samples lost, neither trained nor dropped: {still[:5]}")


def _steps(db: sqlite3.Connection, found: Audit, ended: bool) -> None:
    steps = db.execute("SELECT version, trained, fingerprint FROM steps ORDER BY version").fetchall()
    made = [version for version, trained, _ in steps if trained]
    found.fingerprints = {version: checksum for version, _, checksum in steps if checksum}
    if made != list(range(1, len(made) + 1)):
        found.wrong.append(f"versions are not 1 to {len(made)}: {made}")
    if ended and len(made) < len(steps):
        found.wrong.append(f"journaled and never trained: {[version for version, trained, _ in steps if not trained]}")
    if ended and sorted(found.fingerprints) != made:
        found.wrong.append(f"versions without the checksum of their weights: {set(made) - set(found.fingerprints)}")
    twice = db.execute("SELECT serial, count(*) FROM members GROUP BY serial HAVING count(*) > 1").fetchall()
    if twice:
        found.wrong.append(f"{len(twice)} samples trained in two steps: {twice[:5]}")
    query = (
        "SELECT members.version, id, state, step FROM members JOIN samples USING (serial) "
        "ORDER BY members.version, members.place"
    )
    for version, name, state, step in db.execute(query):
        if step != version:
            found.wrong.append(f"{name} says that it is of version {step}, the journal {version}")
        if state != (TRAINED if version in made else FINISHED):
            found.wrong.append(f"{name} of version {version} is {STATES[state]}")
        found.steps.setdefault(version, []).append(name)
    (loose,) = db.execute(
        "SELECT count(*) FROM samples WHERE state = ? AND serial NOT IN (SELECT serial FROM members)", (TRAINED,)
    ).fetchone()
    if loose:
        found.wrong.append(f"{loose} samples trained without a journal")


def _positions(db: sqlite3.Connection, found: Audit) -> None:
    """Every position of a stage up to the last one issued has its rows: no prompt was passed over."""
    stages: dict[str, Counter[int]] = {}
    for (name,) in db.execute("SELECT DISTINCT id FROM samples"):
        place = SAMPLE_ID.fullmatch(name)
        if place is None:
            found.wrong.append(f"a sample is called {name!r}")
            continue
        stages.setdefault(place["stage"], Counter())[int(place["position"])] += 1
    for stage, seen in stages.items():
        gaps = sorted(set(range(max(seen) + 1)) - set(seen))
        if gaps:
            found.wrong.append(f"prompts of {stage} were never issued: positions {gaps[:10]}")


def _payloads(db: sqlite3.Connection, folder: Path, found: Audit) -> None:
    segments = Segments(folder)
    try:
        query = "SELECT id, segment, offset, length, crc32 FROM samples WHERE segment IS NOT NULL"
        for name, *place in db.execute(query):
            keys = ("segment", "offset", "length", "crc32")
            try:
                segments.read(RecordPlace(**dict(zip(keys, place, strict=True))))
            except StorageError as error:
                found.wrong.append(f"the payload of {name} cannot be read: {error}")
    finally:
        segments.close()


def _lines(run_dir: Path, found: Audit) -> None:
    versions = []
    for line in _json_lines(run_dir / "metrics.jsonl", found):
        if line.get("kind") == "step":
            versions.append(line["version"])
            found.metrics[line["version"]] = {
                name: value
                for name, value in line["metrics"].items()
                if not name.startswith("ledger/") and not name.endswith("_seconds")
            }
        elif line.get("kind") == "eval":
            found.evaluations.append((line["name"], line["version"]))
    if versions != sorted(found.fingerprints):
        found.wrong.append(f"metrics.jsonl has the versions {versions}, not 1 to {len(found.fingerprints)} once each")
    doubled = [key for key, count in Counter(found.evaluations).items() if count > 2]  # a stage ends, the next begins
    if doubled:
        found.wrong.append(f"metrics.jsonl has evaluations again: {doubled}")
    kept = [(row.get("version"), row.get("id")) for row in _json_lines(run_dir / "samples.jsonl", found)]
    doubled_rows = [key for key, count in Counter(kept).items() if count > 1]
    if doubled_rows:
        found.wrong.append(f"samples.jsonl has rows again: {doubled_rows[:5]}")


def _json_lines(path: Path, found: Audit) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:
            found.wrong.append(f"{path.name}:{number} is no JSON: {line[:80]!r}")


def _leftovers(run_dir: Path, found: Audit) -> None:
    names = [p.relative_to(run_dir) for p in run_dir.rglob("*") if LEFT.search(p.name) and p.name != TORCH_DIST]
    if names:
        found.wrong.append(f"left lying about: {[str(name) for name in names[:10]]}")


def _first_difference(one: Any, two: Any) -> str:
    if isinstance(one, dict):
        for key in sorted({*one, *two}, key=str):
            if one.get(key) != two.get(key):
                return f"{key}: {_first_difference(one.get(key), two.get(key))}"
    if isinstance(one, list) and isinstance(two, list):
        for place, (mine, other) in enumerate(zip(one, two, strict=False)):
            if mine != other:
                return f"at {place}: {mine!r} and {other!r}"
        return f"{len(one)} and {len(two)} entries"
    return f"{one!r} and {two!r}"
