"""What is wrong with a configuration, collected, so that one run of `slime` names all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slime_core.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, with the keys it is about.

    Example:
        Problem(code="CFG03", what="train.lr = -1.0 is out of range", keys=(("train", "lr"),), why="it must be >= 0",
                fix="set train.lr to a number of at least 0")
    """

    code: str
    what: str
    keys: tuple[KeyPath, ...] = ()
    where: str = ""
    why: str = ""
    fix: str = ""


def conflict(what: str, keys: Sequence[str], *, why: str = "", fix: str = "", code: str = "CFG04") -> Problem:
    """A conflict between keys, named with dots: ``conflict("...", ["train.lr", "train.min_lr"])``."""
    paths: tuple[KeyPath, ...] = tuple(tuple(key.split(".")) for key in keys)
    return Problem(code=code, what=what, keys=paths, why=why, fix=fix)


def either(one: str, other: str, *, why: str) -> Problem:
    """A conflict of two keys of which one must go."""
    message = f"{one.partition('.')[2]} with {other.partition('.')[2]}"
    return conflict(message, [one, other], why=why, fix="remove one of them")


class Origins:
    """Where each value came from: ``recipe.toml:12``, or the flag."""

    def __init__(self, places: Mapping[KeyPath, str] | None = None) -> None:
        self._places = dict(places or {})

    def __setitem__(self, path: KeyPath, place: str) -> None:
        self._places = {key: text for key, text in self._places.items() if key[: len(path)] != path}
        self._places[path] = place

    def of(self, path: KeyPath) -> str:
        """The place of the value at ``path``, or of the nearest table around it; empty for a default."""
        while path:
            if path in self._places:
                return self._places[path]
            path = path[:-1]
        return ""

    def of_own(self, path: KeyPath) -> str:
        """The place of exactly this key; empty where only a default or a whole table gave it."""
        return self._places.get(path, "")

    def for_stage(self, index: int, sections: Mapping[str, str]) -> Origins:
        """Origins of a resolved stage: its own overrides stand before the recipe's sections."""
        places = dict(self._places)
        for path, place in self._places.items():
            if path[:2] == ("stage", index) and len(path) > 2:
                key = path[2:]
                flat = isinstance(key[0], str) and key[0] in sections
                places[(sections[str(key[0])], *key) if flat else key] = place
        return Origins(places)

    def place(self, problem: Problem) -> Problem:
        """The problem with ``where`` filled from its keys."""
        if problem.where:
            return problem
        places = [self.of(key) for key in problem.keys]
        return replace(problem, where=", ".join(dict.fromkeys(text for text in places if text)))


def dotted(path: KeyPath) -> str:
    """``train.lr``, ``data.tasks[0].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that names every problem; nothing where there is none.

    Raises:
        ConfigError: as :func:`error_of`.
    """
    if problems:
        raise error_of(problems)


def error_of(problems: Sequence[Problem]) -> ConfigError:
    """One error for one or more problems: the first's code; several are numbered, in ``why`` and ``fix``."""
    unique = list(dict.fromkeys(problems))
    first = unique[0]
    if len(unique) == 1:
        return ConfigError(first.what, code=first.code, where=first.where, why=first.why, fix=first.fix)
    fixes: dict[str, list[str]] = {}
    for number, problem in enumerate(unique, 1):
        for line in problem.fix.splitlines():
            fixes.setdefault(line, []).append(str(number))
    places = dict.fromkeys(place for problem in unique for place in problem.where.split(", ") if place)
    return ConfigError(
        f"{len(unique)} problems in the configuration",
        code=first.code,
        where=", ".join(places),
        why="".join(f"\n    {number}. {_line(problem)}" for number, problem in enumerate(unique, 1)),
        fix="\n".join(f"{', '.join(numbers)}. {line}" for line, numbers in fixes.items()),
    )


def _line(problem: Problem) -> str:
    where = f" ({problem.where})" if problem.where else ""
    reason = f": {problem.why}" if problem.why else ""
    return f"{problem.code} {problem.what}{where}{reason}"
