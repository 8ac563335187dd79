"""Verifiable instructions by a row's `instruction_id_list` and `kwargs`.

``ifeval`` is 1 where the response follows every instruction as it stands (prompt-level strict accuracy of Zhou et al.
2023); ``ifbench`` is 1 where the response, or one of its loose forms, does (prompt-level loose accuracy; Pyatkin et
al. 2025 train and evaluate with it). The term ``followed`` is the share of instructions that were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime_core import Reward
from slime_rm_math.graders.instructions.ifbench import IFBENCH
from slime_rm_math.graders.instructions.ifeval import IFEVAL
from slime_rm_math.graders.instructions.parameters import BadRow, Checker, Parameters
from slime_rm_math.graders.verdict import infra

INSTRUCTIONS: Mapping[str, Checker] = {**IFEVAL, **IFBENCH}
MOST = 64  # instructions of one row


def follow(text: str, metadata: Mapping[str, Any], *, loose: bool) -> Reward:
    """How a response follows its row's instructions.

    Example:
        row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        follow("No commas here.", row, loose=False)    # Reward(value=1.0, terms={"followed": 1.0})

    Args:
        text: the response.
        metadata: of the row; a parameter that is None was not given.
        loose: try the response also without its first line, its last line, both, and its asterisks.
    """
    try:
        results = [_followed(text, name, kwargs, loose) for name, kwargs in _instructions(metadata)]
    except BadRow as error:
        return infra(f"the row's instructions: {error}")
    return Reward(value=float(all(results)), terms={"followed": math.fsum(results) / len(results)})


def forms(text: str) -> list[str]:
    """A response and its loose forms: without the first line, the last, both, and each of these without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(form.replace("*", "") for form in cut)]


def _followed(text: str, name: str, kwargs: Mapping[str, Any], loose: bool) -> bool:
    checker = INSTRUCTIONS.get(name)
    if checker is None:
        raise BadRow(f"no check for {name!r} here")
    row = Parameters(kwargs)
    return any(bool(form.strip()) and checker(form, row) for form in (forms(text) if loose else [text]))


def _instructions(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, (list, tuple)) or not 0 < len(names) <= MOST:
        raise BadRow(f"instruction_id_list is {str(names)[:80]!r}, not a list of 1 to {MOST} names")
    arguments = [{}] * len(names) if arguments is None else arguments
    if not isinstance(arguments, (list, tuple)) or len(arguments) != len(names):
        raise BadRow("kwargs is not a list with one entry an instruction")
    if not all(one is None or isinstance(one, Mapping) for one in arguments):
        raise BadRow("an entry of kwargs is not an object")
    return [
        (str(name), {k: v for k, v in (one or {}).items() if v is not None}) for name, one in zip(names, arguments)
    ]
