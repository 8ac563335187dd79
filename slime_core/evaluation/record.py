"""An evaluated set as a JSON file in the run directory: what two evaluations are compared by.

``evaluations/NAME-000004.json`` is set NAME at version 4. It holds no time and no path of a run: the same model, data
and settings give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from slime_core.durable import replace_file, storage_error
from slime_core.evaluation.questions import Question

FOLDER = "evaluations"
FORMAT = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Evaluation:
    """One set, evaluated.

    Example:
        Evaluation(name="aime", version=4, threshold=1.0, figures={"pass@1": 0.5}, questions=[...])
    """

    name: str
    version: int
    threshold: float  # reward from which a sample is right
    figures: dict[str, float]
    questions: list[Question]


def write_record(run_dir: Path, evaluation: Evaluation) -> Path:
    """Write the file, replacing one of the same set and version.

    Raises:
        StorageError: STO109, STO110 or STO121, the disk is full, read-only or broken.
    """
    path = run_dir / FOLDER / f"{evaluation.name}-{evaluation.version:06d}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps({"format": FORMAT, **asdict(evaluation)}, indent=1).encode() + b"\n")
    except OSError as error:
        raise storage_error(error, path, "the record of an evaluation cannot be written") from error
    return path
