"""Who answers a hook: a provider (plugin, function by path, core) and each of its answers, with checked arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_core import hookspecs
from slime_core.errors import PluginError
from slime_core.hookspecs import HOOKS, OWN_PROCESS

Source = Literal["path", "plugin", "core"]
CORE = "core"


@dataclass(slots=True, frozen=True, kw_only=True)
class Provider:
    """Where an answer comes from.

    Example:
        Provider(name="rm_math", origin="slime-rm-math==0.1.0", source="plugin", home=Path(".../slime_rm_math"))
    """

    name: str  # of the plugin, "core", or the config key of a function by path
    origin: str  # distribution==version, or the path that was given
    source: Source
    home: Path | None = None  # folder (or file) of its code

    def __str__(self) -> str:
        return self.name if self.source == "core" else f"{self.name} ({self.origin})"


@dataclass(slots=True, frozen=True, kw_only=True)
class Answer:
    """One implementation of one hook."""

    provider: Provider
    hook: str
    fn: Callable[..., Any]
    takes: frozenset[str] | None  # arguments it names; None takes all

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine by its declaration."""
        return inspect.iscoroutinefunction(self.fn)

    @property
    def own_process(self) -> bool:
        """Whether it is a reward that asks for a process (`slime_core.hookspecs.own_process`)."""
        return bool(getattr(self.fn, OWN_PROCESS, False))

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of ``arguments`` that it takes."""
        if self.takes is None:
            return self.fn(**arguments)
        return self.fn(**{name: value for name, value in arguments.items() if name in self.takes})


def signature_of(hook: str) -> str:
    """``slime_reward(group, ctx)``."""
    return f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})"


def answer(provider: Provider, hook: str, fn: Callable[..., Any]) -> Answer:
    """An Answer whose signature fits the hook's.

    Raises:
        PluginError: PLG53 it asks for arguments that the hook does not have, PLG66 it is async where it may not be.
    """
    expected = set(inspect.signature(getattr(hookspecs, hook)).parameters)
    parameters = inspect.signature(fn).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name, p in named.items() if name not in expected and p.default is p.empty]
    unknown += [f"{p.name} (positional only)" for p in parameters if p.kind is p.POSITIONAL_ONLY]
    where = f"{provider} at {line_of(fn)}"
    if unknown:
        raise PluginError(
            f"{provider.name}.{hook} takes arguments that this hook does not have: {', '.join(unknown)}",
            code="PLG53",
            where=where,
            why=f"found {hook}{inspect.signature(fn)}",
            fix=f"write it as {signature_of(hook)}; arguments may be left out, in any order",
        )
    if not HOOKS[hook].may_await and (inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)):
        raise PluginError(
            f"{provider.name}.{hook} is async, and this hook is called without await",
            code="PLG66",
            where=where,
            fix=f"write it as `def {signature_of(hook)}`",
        )
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise PluginError(f"{provider.name}.{hook} yields; a hook returns its answer", code="PLG66", where=where)
    return Answer(provider=provider, hook=hook, fn=fn, takes=None if takes_all else frozenset(named) & expected)


def line_of(fn: Callable[..., Any]) -> str:
    """``file:line`` of a function, or its name where it has no source."""
    code = getattr(inspect.unwrap(fn), "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)
