"""Every turn of a run as a line of JSON: `RUN/kernelbench/turns.jsonl`, written when a group is scored.

Append-only, schema 1 (:data:`SCHEMA`), a line a turn, keyed by sample id, attempt and (in evaluations, where ids come
back) version. A run that is killed and goes on may generate a group again that was written but never kept by the
ledger: the same turn is not written twice, and one that came out otherwise is written as the next ``revision``, which
is the one that counts (:func:`read`). A line that a kill cut short is removed at the next opening.

`RUN/kernelbench/problems.jsonl` has the problems that turns name, each once: with both, every kernel of a run can be
judged again (`rescore`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import Context, DataError, Group
from slime_kernelbench.types import KernelProblem

if TYPE_CHECKING:
    from slime_kernelbench.dialogue.scoring import ScoredTurn

SCHEMA = 1
FILE = Path("kernelbench") / "turns.jsonl"
PROBLEMS = FILE.with_name("problems.jsonl")
VOLATILE = frozenset({"at", "seconds", "revision", "cached"})  # differ each time that the same turn is made
Key = tuple[str, int, int]


def record(scored: ScoredTurn, group: Group, ctx: Context, *, tokens: bool = True) -> dict[str, Any]:
    """One turn, JSON-ready; ``tokens``: with the ids that were read and sampled."""
    sample, turn = scored.sample, scored.turn
    versions = [version for version in sample.weight_versions if version >= 0]
    row = {
        "schema": SCHEMA,
        "id": sample.id,
        "attempt": sample.attempt,
        "version": ctx.version,  # in training when it was scored
        "made_by": sorted(set(versions)),  # versions of the weights that sampled it
        "stage": ctx.stage,
        "evaluation": ctx.evaluation,
        "group": group.id,
        "task": group.prompt.task,
        "rollout": sample.rollout_id,
        "problem": sample.metadata.get("problem", ""),
        **{name: turn[name] for name in ("turn", "turns", "ended", "finish", "sees", "source", "feedback")},
        "answer": sample.response,
        "verdict": turn["verdict"],
        "terms": scored.worth.terms,
        "reward": scored.worth.value,  # of this turn alone; null where nothing could be judged
        "return": scored.total,  # what it trains on; null: masked
        "kind": scored.reward.kind,
        "reason": scored.reward.reason,
        "prompt_tokens": sample.prompt_length,
        "answer_tokens": sample.response_length,
        "seconds": turn["seconds"],
        "at": time.time(),  # Unix time, for people
    }
    if tokens:
        row |= {"prompt_ids": sample.tokens[: sample.prompt_length], "answer_ids": sample.response_tokens}
    return row


class Records:
    """The file of one run, open for more.

    Example:
        records = Records(run_dir)
        records.add(record(scored, group, ctx))
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self._revisions: dict[Key, tuple[int, str]] = {}  # revision and digest
        self.problems = run_dir / PROBLEMS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.problems.exists():
            _mend(self.problems)
        self._named = {problem.id for problem in read_problems(run_dir)}
        if self.path.exists():
            _mend(self.path)
            for row in _lines(self.path):
                self._revisions[key_of(row)] = int(row.get("revision", 0)), digest(row)

    def add(self, rows: Iterable[dict[str, Any]]) -> int:
        """Write the turns that are new, in one append; the answer is how many."""
        lines = []
        for turn in rows:
            key, mark = key_of(turn), digest(turn)
            revision, before = self._revisions.get(key, (-1, ""))
            if mark != before:
                self._revisions[key] = revision + 1, mark
                lines.append(json.dumps({**turn, "revision": revision + 1}, ensure_ascii=False) + "\n")
        if lines:
            with self.path.open("a", encoding="utf-8", errors="surrogatepass") as file:
                file.write("".join(lines))
        return len(lines)

    def name(self, problem: KernelProblem) -> None:
        """Write a problem, unless it is written."""
        if problem.id not in self._named:
            self._named.add(problem.id)
            with self.problems.open("a", encoding="utf-8", errors="surrogatepass") as file:
                file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")


def read_problems(run_dir: Path) -> list[KernelProblem]:
    """The problems of a run; none where it has written none.

    Raises:
        DataError: DAT19 a line that is no problem.
    """
    path = run_dir / PROBLEMS
    problems = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else (), 1):
        if not line.endswith(b"\n"):
            break  # being written
        try:
            problems.append(KernelProblem(**json.loads(line.decode("utf-8", "surrogatepass"))))
        except (ValueError, TypeError) as error:
            raise DataError("this is not a problem", code="DAT19", where=f"{path}:{number}") from error
    return problems


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The turns of a run, each once in its last revision, in the order in which they were first written.

    Raises:
        DataError: DAT17 the run has no such file, DAT19 a line that is no record, DAT11 another schema.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise DataError(
            f"there are no dialogues in {run_dir}",
            code="DAT17",
            where=str(path),
            why="the file is written when the first group of kernelbench is scored",
            fix="slime kernelbench show RUN_DIR, of a run with --plugin kernelbench",
        )
    latest: dict[Key, dict[str, Any]] = {}
    for turn in _lines(path, whole=True):
        key = key_of(turn)
        if key not in latest or turn.get("revision", 0) >= latest[key].get("revision", 0):
            latest[key] = turn
    return list(latest.values())


def key_of(turn: dict[str, Any]) -> Key:
    """What names a turn in a run."""
    return str(turn["id"]), int(turn["attempt"]), int(turn["version"]) if turn["evaluation"] else -1


def digest(turn: dict[str, Any]) -> str:
    """A checksum of what a turn is, without times, and whether its verdict was remembered."""
    stable = {name: value for name, value in turn.items() if name not in VOLATILE}
    if isinstance(stable.get("verdict"), dict):
        stable["verdict"] = {name: value for name, value in stable["verdict"].items() if name not in VOLATILE}
    text = json.dumps(stable, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _mend(path: Path) -> None:
    """Cut off what follows the last line break."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        place = size
        while place > 0:
            step = min(65536, place)
            file.seek(place - step)
            end = file.read(step).rfind(b"\n")
            if end >= 0:
                place = place - step + end + 1
                break
            place -= step
        if place < size:
            file.truncate(place)


def _lines(path: Path, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and whole:
                return  # being written
            try:
                row = json.loads(line.decode("utf-8", "surrogatepass"))
                schema = row["schema"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError("this is not a turn of a dialogue", code="DAT19", where=f"{path}:{number}") from error
            if schema != SCHEMA:
                fix = "read it with the slime-kernelbench that wrote it"
                message = f"the turns have schema {schema}, this one reads {SCHEMA}"
                raise DataError(message, code="DAT19", where=f"{path}:{number}", fix=fix)
            yield row
