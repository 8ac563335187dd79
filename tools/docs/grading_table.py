"""Writes the agreement table of docs/grading.md: rm_math's graders beside math-verify, over the pairs of its tests.

    python tools/docs/grading_table.py [--check]

A column counts the pairs of a category that a grader judges as a person did. ``dapo`` is DAPO's rule with the answer
as its final line, a rule for whole numbers. ``--check`` writes nothing and fails where the page is out of date.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections import defaultdict
from pathlib import Path

from slime_rm_math.graders import dapo
from slime_rm_math.graders.equivalence import Equivalence

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "plugins" / "slime_rm_math" / "tests" / "data" / "answer_pairs.jsonl"
PAGE = ROOT / "docs" / "grading.md"
BEGIN, END = "<!-- agreement: tools/docs/grading_table.py -->", "<!-- end of agreement -->"
COLUMNS = ("math", "math-verify", "dapo")


def alone(label: str, answer: str) -> bool:
    """What math-verify says by itself."""
    from math_verify import parse, verify

    boxes = ["\\boxed{" + text + "}" for text in (label, answer)]
    return bool(verify(*(parse(box, parsing_timeout=None) for box in boxes), timeout_seconds=None))


async def judged(rows: list[dict[str, object]]) -> list[dict[str, bool]]:
    """What each column says of each pair."""
    equal = Equivalence(workers=1, seconds=1.5, memory_mb=512)
    found = []
    for row in rows:
        label, answer = str(row["label"]), str(row["answer"])
        mine = (await equal.verdict(answer, label)).outcome == "right"
        rule = dapo.answer_of(f"Answer: {answer}")
        by_rule = rule is not None and dapo.is_right(rule, label)
        found.append(dict(zip(COLUMNS, (mine, alone(label, answer), by_rule), strict=True)))
    equal.close()
    return found


def table(rows: list[dict[str, object]], found: list[dict[str, bool]]) -> str:
    """The table, with the pairs that `math` and a person see differently below."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * (2 + len(COLUMNS)))
    for row, told in zip(rows, found, strict=True):
        for name in (str(row["category"]), "all"):
            hits = [told[column] == row["equal"] for column in COLUMNS]
            counts[name] = [a + b for a, b in zip(counts[name], (1, bool(row["equal"]), *hits), strict=True)]
    names = [*sorted(name for name in counts if name != "all"), "all"]
    lines = ["| category | pairs | equal | " + " | ".join(f"`{c}`" for c in COLUMNS) + " |", "| --- " * 6 + "|"]
    lines += [f"| {name} | " + " | ".join(map(str, counts[name])) + " |" for name in names]
    apart = [row for row, told in zip(rows, found, strict=True) if told["math"] != row["equal"]]
    differ = [
        row
        for row, told in zip(rows, found, strict=True)
        if told["math"] != told["math-verify"] and row["category"] != "notation"
    ]
    shown = [", ".join(f"`{row['label']}` and `{row['answer']}`" for row in some) for some in (apart, differ)]
    lines += ["", f"Judged otherwise by `math` than by a person: {shown[0]}."]
    return "\n".join(
        [
            *lines,
            "",
            f"Judged otherwise by `math` than by math-verify alone, for their text, beside notation: {shown[1]}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    logging.disable(logging.CRITICAL)
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    made = table(rows, asyncio.run(judged(rows)))
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    new = f"{before}{BEGIN}\n{made}\n{END}{after}"
    if check:
        sys.exit("docs/grading.md is out of date: python tools/docs/grading_table.py" if new != page else 0)
    PAGE.write_text(new, encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
