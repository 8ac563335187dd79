"""Python's own modules as a candidate gets them: the few names that the policy can follow, and nothing else in them.

Runs inside the candidate's process. What would keep a state, or hold more than it shows, is a stand-in: `lru_cache`
keeps nothing, `partial` has no attributes, a logger is silent, numpy has numbers alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

from slime_kernelbench.judge import names


def shelf(name: str) -> ModuleType:
    """The module ``name``, new, with the names that `names.SHELF` has for it."""
    module = ModuleType(name)
    source = _SOURCES[name]
    for last in names.SHELF[name]:
        setattr(module, last, source[last])
    return module


def _same(function: Any, /) -> Any:
    return function


def _lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
    return maxsize if callable(maxsize) else _same


def _partial(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Callable[..., Any]:
    def call(*more: Any, **others: Any) -> Any:
        return function(*arguments, *more, **{**named, **others})

    return call


def _wraps(wrapped: Any) -> Any:
    return _same


def _silent(*arguments: Any, **named: Any) -> None:
    return None


class _Logger:
    """Says nothing."""

    __slots__ = ()
    debug = info = warning = error = critical = log = setLevel = staticmethod(_silent)


class _Base:
    """In the place of `abc.ABC`."""


_SOURCES: dict[str, dict[str, Any]] = {
    "functools": {
        "cache": _same,
        "lru_cache": _lru_cache,
        "partial": _partial,
        "reduce": functools.reduce,
        "wraps": _wraps,
    },
    "dataclasses": vars(dataclasses),
    "enum": vars(enum),
    "itertools": vars(itertools),
    "operator": vars(operator),
    "collections": vars(collections),
    "contextlib": vars(contextlib),
    "abc": {"ABC": _Base, "abstractmethod": _same},
    "logging": {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
    | dict.fromkeys(("basicConfig", "debug", "info", "warning", "error", "critical"), _silent)
    | {"getLogger": lambda name=None: _Logger()},
    "warnings": dict.fromkeys(("warn", "filterwarnings", "simplefilter"), _silent),
    "numpy": {name: getattr(math, name) for name in ("pi", "e", "inf", "nan", "prod", "sqrt", "exp", "log", "log2")}
    | {"ceil": lambda x: float(math.ceil(x)), "floor": lambda x: float(math.floor(x))},
}

__all__ = ["shelf"]
