"""Records of evaluations in a run directory, read again, found by version, and trimmed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.evaluation.questions import Question
from slime_core.evaluation.record import FOLDER, FORMAT, Evaluation

FILE = re.compile(r"(?P<name>.+)-(?P<version>\d{6,})\.json")


def read_record(path: Path) -> Evaluation:
    """What `slime_core.evaluation.record.write_record` wrote.

    Raises:
        DataError: DAT30 the file is not readable, or no such record.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        questions = [Question(**row) for row in data.pop("questions")]
        return Evaluation(**data, questions=questions)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path.name} is not a record of an evaluation",
            code="DAT30",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix=f"name a run directory, or a file that slime eval wrote to {FOLDER}/",
        ) from error


def find_records(path: Path, version: int | None = None) -> list[Evaluation]:
    """The records of a run directory, of each set the newest or that of ``version``; or the one that is named.

    Raises:
        DataError: DAT17 there are none; DAT30 as :func:`read_record`.
    """
    if path.is_file():
        return [read_record(path)]
    newest: dict[str, tuple[int, Path]] = {}
    for file in _files(path):
        match = FILE.fullmatch(file.name)
        if match and version in (None, int(match["version"])):
            newest[match["name"]] = max(newest.get(match["name"], (-1, file)), (int(match["version"]), file))
    if not newest and not path.exists():
        raise DataError(
            f"there is no {path}",
            code="DAT17",
            where=str(path.absolute()),
            fix=f"name a run directory, or a file of its {FOLDER}/",
        )
    if not newest:
        versions = sorted({int(match["version"]) for file in _files(path) if (match := FILE.fullmatch(file.name))})
        at = "" if version is None else f" of version {version}"
        raise DataError(
            f"{path} has no records of evaluations{at}",
            code="DAT17",
            where=str(path.absolute() / FOLDER),
            why=f"it has {_listed(path)}",
            fix=f"name a version that it has: {', '.join(map(str, versions[-10:]))}"
            if versions
            else f"slime eval {path} --run-dir NEW   writes them; then name NEW",
        )
    return [read_record(file) for _, file in newest.values()]


def trim_records(path: Path, version: int) -> None:
    """Remove a run directory's records of later versions than ``version``."""
    for file in _files(path):
        if (match := FILE.fullmatch(file.name)) and int(match["version"]) > version:
            file.unlink()


def _files(path: Path) -> list[Path]:
    return sorted((path / FOLDER).glob("*.json"))


def _listed(path: Path) -> str:
    files = sorted(file.name for file in _files(path))
    return ", ".join(files[:10]) or "none"


def by_name(records: Sequence[Evaluation]) -> dict[str, Evaluation]:
    """Records by set."""
    return {record.name: record for record in records}
