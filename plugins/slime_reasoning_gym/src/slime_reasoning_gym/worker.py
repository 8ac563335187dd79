"""The process that makes entries and scores answers: reasoning_gym is imported here and nowhere else.

    python -m slime_reasoning_gym.worker FD PARENT          one JSON line a request, one a response

It runs with ``PYTHONHASHSEED=0``: some tasks iterate over sets of strings, and only with one hash for all processes is
an entry a function of its address. Scorers of nine tasks hand the answer to `eval` or to sympy, which runs it: here
they read literals and arithmetic, and nothing that a model wrote is run.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from slime_core.parent import die_with

CHUNK = 500  # entries of a dataset; some tasks have no more of one seed
DATASETS = 64  # that are kept
MEMORY = 4 << 30  # bytes of address space
LITERAL_READERS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose scorers evaluate an answer that is a list."""
FUNCTIONS = "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs pi".split()  # noqa: SIM905
NOT_ARITHMETIC = re.compile(r"[^\w\s+\-*/^().,]|\.\D|\.$|_", re.ASCII)
TOWER = re.compile(r"(\*\*|\^)[\s(+-]*(\w*\s*(\*\*|\^)|\d{4})")
"""A power in an exponent, or an exponent of four digits: a number that no memory holds."""


@dataclass(frozen=True)
class EntryAddress:
    """What an entry is a function of."""

    dataset: str
    level: int | None  # of the task's curriculum; None takes its defaults
    parameters: str  # JSON
    seed: int
    index: int  # below CHUNK


class BadAnswer(Exception):
    """A scorer raised for an answer, and does not for the task's own."""


class Library:
    """The requests of :func:`main`, by name."""

    def __init__(self) -> None:
        import reasoning_gym
        import sympy
        from reasoning_gym import factory, utils

        self._factory, self._utils, self._version = factory, utils, reasoning_gym.__version__
        self._parse = sympy.parse_expr
        self._dataset = lru_cache(DATASETS)(self._make_dataset)
        self._entry = lru_cache(CHUNK)(lambda address: self._dataset_of(address)[address.index])
        for name, (dataset, _) in factory.DATASETS.items():
            module = sys.modules[dataset.__module__]
            if name in LITERAL_READERS:
                vars(module)["eval"] = ast.literal_eval
            if vars(module).get("parse_expr") is self._parse:
                vars(module)["parse_expr"] = self._arithmetic
        sympy.parse_expr = self._arithmetic

    def describe(self) -> dict[str, Any]:
        """Tasks, each with the highest level of its curriculum (None without one), and system prompts."""
        names = sorted(set(self._factory.DATASETS) - {"composite"})
        return {"levels": {name: self._top(name) for name in names}, "system_prompts": self._utils.SYSTEM_PROMPTS}

    def check(self, **address: Any) -> dict[str, Any]:
        """Make a dataset; ``fields`` are its parameters, ``curriculum`` those that a level sets."""
        dataset = EntryAddress(**address).dataset
        names = [field.name for field in fields(self._factory.DATASETS[dataset][1])]
        levelled = self._levelled(dataset) if self._factory.has_curriculum(dataset) else []
        facts = {"fields": sorted({*names} - {"seed", "size"}), "curriculum": levelled, "problem": ""}
        try:
            self._dataset_of(EntryAddress(**address))
        except Exception as error:  # a task's own check: an assertion, or whatever a wrong type ends in
            facts["problem"] = str(error) or type(error).__name__
        return facts

    def entry(self, **address: Any) -> dict[str, Any]:
        """Question and answer, which is None where a task has no single one."""
        entry = self._entry(EntryAddress(**address))
        answer = entry["answer"]
        return {"question": str(entry["question"]), "answer": None if answer is None else str(answer)}

    def score(self, answer: str, **address: Any) -> float:
        """The task's own score of an answer."""
        at = EntryAddress(**address)
        dataset, entry = self._dataset_of(at), self._entry(at)
        try:
            value = float(dataset.score_answer(answer, entry))
        except Exception as error:
            dataset.score_answer(entry["answer"] or "", entry)  # raises where it is not this answer's fault
            raise BadAnswer(f"{type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise ValueError(f"its score is {value}")
        return value

    def _dataset_of(self, address: EntryAddress) -> Any:
        return self._dataset(address.dataset, address.level, address.parameters, address.seed)

    def _make_dataset(self, name: str, level: int | None, parameters: str, seed: int) -> Any:
        values = {**json.loads(parameters), "seed": seed, "size": CHUNK}
        return self._factory.DATASETS[name][0](self._config(name, level, values))

    def _config(self, name: str, level: int | None, values: dict[str, Any]) -> Any:
        if level is None:
            config = self._factory.DATASETS[name][1](**values)
        else:
            curriculum = self._factory.create_curriculum(name)
            curriculum.set_global_level(level)
            config = curriculum.generate_configuration(values)
        if hasattr(config, "validate"):
            config.validate()
        return config

    def _top(self, name: str) -> int | None:
        """The highest level; some curricula end with levels that their own task refuses."""
        if not self._factory.has_curriculum(name):
            return None
        attributes = self._factory.create_curriculum(name).attributes.values()
        for level in reversed(range(max((len(attribute.levels) for attribute in attributes), default=0))):
            with suppress(Exception):
                self._config(name, level, {"seed": 0, "size": CHUNK})
                return level
        return None

    def _levelled(self, name: str) -> list[str]:
        attributes = self._factory.create_curriculum(name).attributes.values()
        keys = ("field_name", "lower_field_name", "upper_field_name")
        return sorted({vars(attribute)[key] for attribute in attributes for key in keys if key in vars(attribute)})

    def _arithmetic(self, text: str, *args: Any, **kwargs: Any) -> Any:
        """`sympy.parse_expr` of arithmetic alone: it would run calls, attributes and strings."""
        words = re.findall(r"[^\W\d]\w*", text)
        if (
            NOT_ARITHMETIC.search(text)
            or TOWER.search(text)
            or not all(len(word) == 1 or word in FUNCTIONS for word in words)
        ):
            raise ValueError("no arithmetic")
        return self._parse(text, *args, **kwargs)


def main() -> None:
    """Serve until the other side closes."""
    die_with(int(sys.argv[2]))
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    library: Library | None = None
    with socket.socket(fileno=int(sys.argv[1])).makefile("rwb") as file:
        for line in file:
            request = json.loads(line)
            try:
                library = library or Library()
                work: Callable[..., Any] = getattr(library, request.pop("do"))
                response = {"value": work(**request)}
            except BadAnswer as error:
                response = {"error": str(error), "by_answer": True}
            except Exception as error:  # a task may raise anything
                response = {"error": f"{type(error).__name__}: {error}", "by_answer": False}
            file.write(json.dumps(response).encode() + b"\n")
            file.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
