"""Write the problems, the pupil's traces and the tokenizer of this folder; what it writes is kept; a test compares.

    python examples/tool_use/make_problems.py

Problems are products of two numbers from 320 to 999, so that each has six digits. The pupil works two traces of five
out with the interpreter, whose output is the sandbox's, and guesses in the others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from random import Random

from interpreter import Interpreter, Settings

from slime_core import Context
from slime_core.config.schema import Config
from slime_core.testing.models import piece_tokenizer, write_tokenizer

HERE = Path(__file__).parent
TRACES, TRAIN, HELDOUT = 1500, 400, 100
GUESSED = 0.6
PIECES = ["<code>", "</code>", "<interpreter>", "</interpreter>", "print(", "\\boxed{"]


def rows(seed: int = 0) -> dict[str, list[dict[str, object]]]:
    """Rows by name of their file, no problem in two of them. Traces have the code that they run, and no output."""
    draw = Random(seed)
    pairs = draw.sample([(a, b) for a in range(320, 1000) for b in range(320, 1000)], TRACES + TRAIN + HELDOUT)
    made: dict[str, list[dict[str, object]]] = {"traces": [], "train": [], "heldout": []}
    for number, (a, b) in enumerate(pairs):
        name = "traces" if number < TRACES else "train" if number < TRACES + TRAIN else "heldout"
        row: dict[str, object] = {"question": f"{a}*{b}=?\n", "answer": str(a * b)}
        if name == "traces":
            guess = draw.random() < GUESSED
            said = draw.randrange(100_000, 1_000_000) if guess else a * b
            row["metadata"] = {"trace": [*([] if guess else [[f"print({a}*{b})", ""]]), f"\\boxed{{{said}}}"]}
        made[name].append(row)
    return made


async def run_code(traces: list[dict[str, object]]) -> None:
    """Fill in what the sandbox prints."""
    python, ctx = Interpreter(), Context(config=Config())
    turns = [turn for row in traces for turn in row["metadata"]["trace"][:-1]]  # type: ignore[index]
    printed = await asyncio.gather(*(python.run(code, Settings(), ctx) for code, _ in turns))
    for turn, text in zip(turns, printed, strict=True):
        turn[1] = text
    await python.aclose()


def main(folder: Path = HERE) -> None:
    """Write everything into ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    made = rows()
    asyncio.run(run_code(made["traces"]))
    for name, lines in made.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokenizer(folder / "model", piece_tokenizer(PIECES), context_len=512)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
