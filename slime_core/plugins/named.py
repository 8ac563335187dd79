"""Things that plugins register under a name: reward types, advantage estimators, losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_core.errors import ConfigError, PluginError, nearest
from slime_core.hookspecs import OWN_PROCESS
from slime_core.plugins.boundary import call_now, wrong
from slime_core.plugins.load import Loaded
from slime_core.plugins.provider import Answer
from slime_core.protocols import Estimator, Loss

NAMED_HOOKS = {
    "slime_reward_types": ("reward type", "reward.rm_type"),
    "slime_advantage": ("advantage estimator", "train.advantage_estimator"),
    "slime_loss": ("loss", "train.loss_type"),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Registry:
    """Name to what was registered, and by whom."""

    kind: str
    key: str
    answers: Mapping[str, Answer]
    values: Mapping[str, Any]

    def answer(self, name: str, key: str = "") -> Answer:
        """Who registered ``name``, which ``key`` asks for; for reward types its ``fn`` is the function.

        Raises:
            ConfigError: CFG04 nobody did.
        """
        if name not in self.answers:
            known = tuple(sorted(self.answers))
            raise ConfigError(
                f"unknown {self.kind} '{name}'",
                code="CFG04",
                where=key or self.key,
                why=f"registered: {', '.join(known) or 'none'}",
                fix=nearest(name, known)
                or f"set {key or self.key} to one of these, or load the plugin that brings it: --plugin NAME "
                "(installed: slime plugins list)",
            )
        return self.answers[name]

    def value(self, name: str) -> Any:
        """What was registered under ``name``.

        Raises:
            ConfigError: CFG04 nothing was.
        """
        self.answer(name)
        return self.values[name]


def collect(hook: str, plugins: Sequence[Loaded]) -> Registry:
    """Everything registered through ``hook``.

    Raises:
        PluginError: PLG52 a name is registered twice, by plugins or by the core; PLG57 something of a wrong type.
    """
    kind, key = NAMED_HOOKS[hook]
    answers: dict[str, Answer] = {}
    values: dict[str, Any] = {}
    for plugin in plugins:
        if hook not in plugin.answers:
            continue
        source = plugin.answers[hook]
        for name, value in _entries(source, call_now(source, {}, about="the run")).items():
            if name in answers:
                core = source.provider.source == "core"  # it is asked last
                raise PluginError(
                    f"the {kind} '{name}' is registered by {answers[name].provider} and by {source.provider}",
                    code="PLG52",
                    where=hook,
                    why="the config could not say which of them runs",
                    fix=f"rename the plugin's: name='my_{name}'" if core else "load one of the two plugins",
                )
            values[name] = value
            answers[name] = _as_answer(source, value) if hook == "slime_reward_types" else source
    return Registry(kind=kind, key=key, answers=answers, values=values)


def _entries(source: Answer, found: Any) -> dict[str, Any]:
    if source.hook == "slime_reward_types":
        if isinstance(found, Mapping) and all(isinstance(n, str) and callable(f) for n, f in found.items()):
            return dict(found)
        raise wrong(source, f"returned {found!r}", "the run", code="PLG57", fix="return names and functions")
    kind = Estimator if source.hook == "slime_advantage" else Loss
    if not isinstance(found, (list, tuple)) or not all(isinstance(item, kind) for item in found):
        raise wrong(
            source, f"returned {found!r}", "the run", code="PLG57", fix=f"return a list of slime_core.{kind.__name__}"
        )
    return {item.name: item for item in found}


def _as_answer(source: Answer, fn: Callable[..., Any]) -> Answer:
    """A reward type as an answer that takes ``sample`` and ``ctx``, whatever it calls them."""

    def given(sample: Any, ctx: Any) -> Any:
        return fn(sample, ctx)

    async def asked(sample: Any, ctx: Any) -> Any:
        return await fn(sample, ctx)

    found = asked if inspect.iscoroutinefunction(fn) else given
    if getattr(fn, OWN_PROCESS, False):
        setattr(found, OWN_PROCESS, True)
    return replace(source, fn=found, takes=None)
