"""Loading of problems; a bad row is an error that names file and line, an id is found once.

shipped                        those that come with the plugin
OWNER/NAME[:level_2]           a hub data set, KernelBench's columns and splits
problems.jsonl  some.parquet   rows, see `rows.py`
FOLDER                         Parquet files anywhere in it, else files of Python: level1/19_ReLU.py, or any name
problem.py                     one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime_core import DataError
from slime_core.data.hub import HubRows, is_hub_name
from slime_core.data.jsonl import JsonlRows
from slime_core.data.parquet import ParquetRows
from slime_core.errors import nearest
from slime_kernelbench.problems.catalogue import shipped
from slime_kernelbench.problems.rows import of_file, of_row
from slime_kernelbench.types import KernelProblem

SPLITS = ("level_1", "level_2", "level_3", "level_4")
MAX_LINE = 8 << 20  # bytes
COLUMNS = ("code", "level", "name", "problem_id", "id", "label", "extra_info")


def load(where: str | Path, *, levels: Sequence[int] = ()) -> list[KernelProblem]:
    """The problems of a place, in its order; of some ``levels`` where any are named.

    Example: load("shipped", levels=(1,)), load("ScalingIntelligence/KernelBench:level_1"), load("mine.jsonl")

    Raises:
        DataError: CFG05 there is nothing, DAT17 it holds no problem, DAT22 an id twice, or as `rows.of_row`.
    """
    problems = list(_read(str(where)))
    _check_ids(problems)
    chosen = [problem for problem in problems if not levels or problem.level in levels]
    if not chosen:
        have = sorted({problem.level for problem in problems})
        raise DataError(
            f"{where} holds no problem" + (f" of level {', '.join(map(str, levels))}" if problems else ""),
            code="DAT17",
            where=str(where),
            why=f"its levels are {have}" if problems else "",
            fix="name a JSONL, Parquet or Python file, a folder of them, OWNER/NAME on the hub, or: shipped",
        )
    return chosen


def _read(where: str) -> Iterable[KernelProblem]:
    path = Path(where)
    if where == "shipped":
        return shipped()
    if path.is_dir():
        return _hub(where) if (path / "dataset_dict.json").is_file() else _folder(path)
    if path.is_file():
        return _file(path)
    if is_hub_name(where) and not path.suffix:
        return _hub(where)
    raise DataError(
        f"there are no problems at {where}",
        code="CFG05",
        where=f"{path.absolute()}",
        why="it is neither a file, a folder nor a name of a hub data set",
        fix=nearest(where, ("shipped",)) or "slime kernelbench problems list --problems shipped",
    )


def _folder(folder: Path) -> Iterator[KernelProblem]:
    tables = sorted(folder.rglob("*.parquet"))
    for path in tables:
        yield from _rows(ParquetRows(path, columns=COLUMNS), path.stem)
    if not tables:
        for path in sorted(folder.rglob("*.py"), key=_natural):
            if path.name != "__init__.py":
                yield of_file(path)


def _natural(path: Path) -> tuple[str, int, str]:
    """Files of Python by their number: 2_x.py before 10_y.py."""
    number = path.name.partition("_")[0]
    return str(path.parent), int(number) if number.isdecimal() else 0, path.name


def _file(path: Path) -> Iterable[KernelProblem]:
    if path.suffix == ".py":
        return [of_file(path)]
    if path.suffix == ".parquet":
        return _rows(ParquetRows(path, columns=COLUMNS), path.stem)
    return _rows(JsonlRows(path, max_line_bytes=MAX_LINE), path.stem)


def _hub(spec: str) -> Iterator[KernelProblem]:
    if ":" in spec:
        yield from _rows(HubRows(spec), spec)
        return
    absent: DataError | None = None
    total = 0
    for split in SPLITS:
        try:
            rows = HubRows(f"{spec}:{split}")
        except DataError as error:
            if error.code != "DAT18":  # another error than a split that is not there
                raise
            absent = error
            continue
        total += len(rows)
        yield from _rows(rows, split)
    if not total and absent is not None:
        raise absent


def _rows(rows: Any, stem: str) -> Iterator[KernelProblem]:
    name = stem.rpartition("/")[2].partition(":")[0]
    try:
        for number in range(len(rows)):
            yield of_row(rows[number], rows.where(number), otherwise=f"{name}/{number + 1}")
    finally:
        rows.close()


def _check_ids(problems: Sequence[KernelProblem]) -> None:
    first: dict[str, KernelProblem] = {}
    twice = [(problem, first.setdefault(problem.id, problem)) for problem in problems]
    clashes = [(one, other) for one, other in twice if one is not other]
    if clashes:
        shown = "; ".join(f"{one.id} at {other.where} and {one.where}" for one, other in clashes[:5])
        raise DataError(
            f"{len(clashes)} problems have an id that another has",
            code="DAT22",
            where=clashes[0][0].where,
            why=shown,
            fix="name the file of one level, or give each row an `id`",
        )
