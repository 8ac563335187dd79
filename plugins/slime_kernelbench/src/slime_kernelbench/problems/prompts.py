"""Rows of a task: the problems of a level and of a side of the split, as prompts.

kernelbench   kernelbench_heldout   kernelbench_level2   kernelbench_level2_heldout   kernelbench_all
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from slime_core import ConfigError, DataError, Prompt
from slime_kernelbench.problems.load import load
from slime_kernelbench.problems.split import Split, split
from slime_kernelbench.types import KernelProblem

TASK = re.compile(r"kernelbench(_all|(_level(?P<level>\d+))?(?P<heldout>_heldout)?)")
Render = Callable[[KernelProblem], Any]  # a text, or messages


class ProblemRows:
    """Problems by number, as the core asks for them; ``label`` is the reference, ``metadata`` the whole problem.

    Example:
        rows = ProblemRows(shipped(), render=lambda problem: problem.source)
        problem_of(rows.at(0))      # Problem(id="slime/1/add", ...)
    """

    def __init__(self, problems: Sequence[KernelProblem], *, render: Render) -> None:
        self.problems = list(problems)
        self._render = render

    def __len__(self) -> int:
        return len(self.problems)

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens."""
        problem = self.problems[position]
        return Prompt(
            id="",
            position=position,
            prompt=self._render(problem),
            label=problem.source,
            metadata={"problem": asdict(problem)},
            where=problem.where,
        )

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows and their order."""
        digest = sha256("\0".join(f"{problem.id}\0{problem.source}" for problem in self.problems).encode())
        return {"rows": len(self), "sha256": digest.hexdigest()}


def problem_of(prompt: Prompt) -> KernelProblem:
    """The problem that a prompt of :class:`ProblemRows` asks."""
    return KernelProblem(**prompt.metadata["problem"])


def rows_of(task: str, where: str, *, heldout: float, seed: int, render: Render) -> ProblemRows:
    """The rows of a task over the problems at ``where``; ``default`` is the same as ``kernelbench``.

    Raises:
        ConfigError: CFG05 there is no such task.
        DataError: DAT17 a side of the split is empty, or as `load`.
    """
    match = TASK.fullmatch("kernelbench" if task == "default" else task)
    if match is None:
        raise ConfigError(
            f"kernelbench has no task '{task}'",
            code="CFG05",
            where="data.tasks or eval.eval_tasks",
            fix="kernelbench, kernelbench_heldout, kernelbench_level1, kernelbench_level1_heldout, kernelbench_all",
        )
    levels = (int(match["level"]),) if match["level"] else ()
    if match[1] == "_all":
        return ProblemRows(load(where), render=render)
    sides: Split = split(load(where), heldout=heldout, seed=seed)
    side = sides.heldout if match["heldout"] else sides.train
    chosen = [problem for problem in side if not levels or problem.level in levels]
    if not chosen:
        raise DataError(
            f"no problem of {where} belongs to the task {task}",
            code="DAT17",
            where=f"[plugin.kernelbench] problems = {where!r}, heldout = {heldout}",
            why=f"{len(sides.train)} are there to train on, {len(sides.heldout)} are held out",
            fix="another share in plugin.kernelbench.heldout, or another level",
        )
    return ProblemRows(chosen, render=render)
