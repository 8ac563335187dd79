"""Write the rows of this folder with reasoning-gym 0.1.25 (pip install reasoning-gym); what it writes is kept.

    python examples/real_model/make_rows.py

Sums of two or three numbers of one or two digits (``chain_sum``), and the word problems of GSM-Symbolic
(Mirzadeh et al. 2024, ``gsm_symbolic``): questions as chat messages, answers as whole numbers. No question is in two
rows, so none that is held out is trained on; both parts are drawn alike, easy questions and hard ones.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent / "rows"
TRAIN, HELDOUT = 2000, 200
TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "gsm_symbolic": {},
}


def rows(task: str, seed: int = 1) -> list[dict[str, Any]]:
    """Distinct questions with a whole number as the answer, in the order in which they are drawn."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(task, seed=seed, size=2 * (TRAIN + HELDOUT), **TASKS[task])
    answers = {entry["question"]: entry["answer"] for entry in drawn if re.fullmatch(r"-?\d+", entry["answer"])}
    questions = list(answers)[: TRAIN + HELDOUT]
    Random(seed).shuffle(questions)  # of few easy ones, most are drawn early
    return [{"question": [{"role": "user", "content": text}], "answer": answers[text]} for text in questions]


def main(folder: Path = HERE) -> None:
    """Write everything into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        drawn = rows(task)
        for part, lines in (("train", drawn[:TRAIN]), ("heldout", drawn[TRAIN:])):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (folder / f"{task}_{part}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
