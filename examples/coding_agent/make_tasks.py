"""Write the tasks, the pupil's traces and the tokenizer of this folder; what it writes is kept; a test compares.

    python examples/coding_agent/make_tasks.py

A task is a small package with a planted bug, an instruction, and hidden cases. The pupil looks before it edits in two
traces of five; in the others it guesses what the file says.
"""

from __future__ import annotations

import asyncio
import json
import operator
import sys
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

from coder import arguments_of
from workspace import Workspaces

from slime_core import Context
from slime_core.config.schema import Config
from slime_core.testing.models import piece_tokenizer, write_tokenizer

HERE = Path(__file__).parent
TRACES, TRAIN, HELDOUT = 1200, 300, 100
GUESSED = 0.6
NAMES, LETTERS = ("rate", "cost", "size", "gain", "load", "span"), "ghkmnpvw"
VERBS = {"add": " + ", "subtract": " - ", "multiply": " * "}
OPERATORS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
FILE = "shop/core.py"
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
HEADS = (
    '<tool_call>{"name": "bash", "arguments": {"command": "',
    '<tool_call>{"name": "edit", "arguments": {"path": "',
)
PIECES = [
    "<user>",
    "<assistant>",
    "<tool>",
    *HEADS,
    '", "old": "',
    '", "new": "',
    '"}}</tool_call>',
    "Fix ",
    " in ",
    "cat ",
]
PIECES += [": it must ", *VERBS, *VERBS.values(), FILE, "def ", "return ", "    ", *NAMES, "edited", "done"]
PIECES += ["the text occurs 0 times", "):\n"]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<eos>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}
"""


def rows(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Rows by name of their file, no task in two of them. Traces have the calls, and no results."""
    draw = Random(seed)
    changes = permutations(VERBS, 2)
    every = list(product(NAMES, permutations(LETTERS, 2), changes))
    tasks = draw.sample(every, TRACES + TRAIN + HELDOUT)
    rows_by_file: dict[str, list[dict[str, Any]]] = {"traces": [], "train": [], "heldout": []}
    for number, (name, letters, (wrong, right)) in enumerate(tasks):
        file = "traces" if number < TRACES else "train" if number < TRACES + TRAIN else "heldout"
        row = task(name, letters, wrong, right)
        if file == "traces":
            row["metadata"]["trace"] = trace(letters, wrong, right, draw)
        rows_by_file[file].append(row)
    return rows_by_file


def task(name: str, letters: tuple[str, str], wrong: str, right: str) -> dict[str, Any]:
    """A row: a package whose function has the wrong operator."""
    first, second = letters
    body = f"def {name}({first}, {second}):\n    return {first}{VERBS[wrong]}{second}\n"
    cases = [[name, [a, b], repr(OPERATORS[right](a, b))] for a, b in ((7, 3), (2, 5), (-4, 9))]
    files = {"shop/__init__.py": f"from shop.core import {name}\n", FILE: body}
    question = f"Fix {name} in {FILE}: it must {right}."
    return {"question": question, "answer": right, "metadata": {"files": files, "module": "shop", "cases": cases}}


def trace(letters: tuple[str, str], wrong: str, right: str, draw: Random) -> list[Any]:
    """What the pupil says, with room for the results of its calls."""
    guesses = draw.random() < GUESSED
    first, second = draw.sample(LETTERS, 2) if guesses else letters
    operator = VERBS[draw.choice([verb for verb in VERBS if verb != right]) if guesses else wrong]
    look = CALL.format("bash", json.dumps({"command": f"cat {FILE}"}))
    old, new = f"{first}{operator}{second}", f"{first}{VERBS[right]}{second}"
    change = CALL.format("edit", json.dumps({"path": FILE, "old": old, "new": new}))
    return [*([] if guesses else [[look, ""]]), [change, ""], "done"]


async def run_calls(traces: list[dict[str, Any]]) -> None:
    """Fill in what the tools return."""
    workspaces, ctx = Workspaces(), Context(config=Config())

    async def run(row: dict[str, Any]) -> None:
        async with workspaces.open(row["metadata"], ctx) as workspace:
            for turn in row["metadata"]["trace"][:-1]:
                function = json.loads(turn[0].removeprefix("<tool_call>").removesuffix("</tool_call>"))
                function["arguments"] = json.dumps(function["arguments"])
                turn[1] = await workspace.call(function["name"], arguments_of({"function": function}))

    await asyncio.gather(*map(run, traces))
    await workspaces.aclose()


def main(folder: Path = HERE) -> None:
    """Write everything into ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    rows_by_file = rows()
    asyncio.run(run_calls(rows_by_file["traces"]))
    for name, lines in rows_by_file.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokenizer(folder / "model", piece_tokenizer(PIECES), context_len=256, chat_template=TEMPLATE)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
