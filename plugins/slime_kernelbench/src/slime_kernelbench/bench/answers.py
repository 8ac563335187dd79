"""Finished answers as JSONL: what is to be judged, and the file that a bench leaves.

{"problem": "slime/1/relu", "answer": "Here it is:\\n```python\\n..."}     the code is taken from the fences
{"problem": "slime/1/relu", "source": "import triton ..."}               the code itself
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import DataError
from slime_core.data.jsonl import JsonlRows
from slime_core.errors import nearest
from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.dialogue.extract import extract
from slime_kernelbench.types import Diagnostic, KernelProblem, Verdict

MAX_LINE = 16 << 20  # bytes


@dataclass(slots=True, frozen=True, kw_only=True)
class BenchAnswer:
    """One finished answer to a problem; without ``source`` there is no code in it.

    Example: BenchAnswer(problem=relu, text="```python\\n...```", source="...")
    """

    problem: KernelProblem
    text: str
    source: str | None
    why: str = ""  # there is no source

    @classmethod
    def of(cls, problem: KernelProblem, text: str) -> BenchAnswer:
        """An answer as it was sampled."""
        extraction = extract(text)
        return cls(problem=problem, text=text, source=extraction.source, why=extraction.why)


def read_answers(path: Path, problems: Sequence[KernelProblem]) -> list[BenchAnswer]:
    """The answers of a file.

    Raises:
        DataError: DAT17 there is none, DAT18 a row without its keys, DAT24 one of another type, CFG05 no such problem.
    """
    by_id = {problem.id: problem for problem in problems}
    try:
        rows = JsonlRows(path, max_line_bytes=MAX_LINE)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", code="CFG05", where="--answers", fix="name a JSONL file"
        ) from error
    try:
        answers = [_answer(rows[number], rows.where(number), by_id) for number in range(len(rows))]
    finally:
        rows.close()
    if not answers:
        raise DataError(f"{path} holds no answer", code="DAT17", where=str(path))
    return answers


def write_answers(path: Path, answers: Sequence[BenchAnswer], verdicts: Sequence[Verdict]) -> None:
    """One line an answer, with its verdict beside it; `read_answers` reads it again, and takes no verdict from it."""
    with path.open("w", encoding="utf-8") as file:
        for answer, verdict in zip(answers, verdicts, strict=True):
            row = {"problem": answer.problem.id, "answer": answer.text, "verdict": verdict_to_json(verdict)}
            file.write(json.dumps(row) + "\n")


def no_code(answer: BenchAnswer) -> Verdict:
    """The verdict on an answer without code: its author's fault, and nothing is run."""
    diagnostic = Diagnostic(stage="static", kind="no_code", message=answer.why or "the answer has no code")
    return Verdict(status="rejected", reached="static", diagnostics=(diagnostic,))


def _answer(row: Mapping[str, Any], where: str, problems: Mapping[str, KernelProblem]) -> BenchAnswer:
    id_ = row.get("problem")
    texts = {key: row[key] for key in ("answer", "source") if key in row}
    if not isinstance(id_, str) or not texts:
        raise DataError(
            "the row is not an answer",
            code="DAT18",
            where=where,
            why=f"its keys are {', '.join(map(repr, row)) or 'none'}",
            fix='{"problem": ID, "answer": TEXT} or {"problem": ID, "source": CODE}',
        )
    if id_ not in problems:
        fix = nearest(id_, list(problems)) or "name the same --problems as when it was sampled"
        raise DataError(f"there is no problem '{id_:.100}'", code="CFG05", where=where, fix=fix)
    for key, value in texts.items():
        if not isinstance(value, str):
            raise DataError(f"{key} is {value!r:.60}, not a string", code="DAT24", where=where)
    if "answer" in texts:
        return BenchAnswer.of(problems[id_], texts["answer"])
    return BenchAnswer(problem=problems[id_], text=texts["source"], source=texts["source"])
