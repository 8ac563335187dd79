"""Route hooks: for every config (a stage's), hook and task, the implementation that is called.

Votes and events call all, things with a name are looked up. An owner hook has one implementation a task:

    function by path for this run > the task's own choice > the plugin that owns the task > a plugin that owns no task
    > core

Two of equal rank are an error. With `rollout.rollout_buffer_url` the plugin `buffer` generates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, PluginError, nearest
from slime_core.hookspecs import HOOKS, OWN_PROCESS, own_process
from slime_core.plugins.backends import BUFFER
from slime_core.plugins.boundary import LONGEST, HookImpl, call_now, listed, wrong
from slime_core.plugins.load import LoadedPlugin
from slime_core.protocols import Estimator, Loss

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.data import DataTask

OWNER_HOOKS = tuple(name for name, info in HOOKS.items() if info.kind == "owner")
LISTENER_HOOKS = tuple(name for name, info in HOOKS.items() if info.kind in ("vote", "event"))
DEFAULT_TASK = "default"
INFRA = "rollout_buffer_error"  # in the metadata of a sample that did not come from a rollout buffer

NAMED_HOOKS = {
    "slime_reward_types": ("reward type", "reward.rm_type"),
    "slime_advantage": ("advantage estimator", "train.advantage_estimator"),
    "slime_loss": ("loss", "train.loss_type"),
}


def core_has_work(hook: str, config: Config) -> bool:
    """Whether the core's own vote or event hook does anything: it is called for every sample."""
    train = config.train
    return hook != "slime_sample_done" or bool(train.teacher_load and train.teacher_place == "engine")


@dataclass(slots=True, frozen=True, kw_only=True)
class Registry:
    """Name to what was registered, and by whom."""

    kind: str
    key: str
    entries: Mapping[str, tuple[HookImpl, Any]]

    def impl(self, name: str, key: str = "") -> HookImpl:
        """The implementation that registered ``name``, which ``key`` names; of a reward type ``fn`` is the function.

        Raises:
            ConfigError: CFG04 nobody did.
        """
        if name not in self.entries:
            names, key = tuple(sorted(self.entries)), key or self.key
            others = "load the plugin that provides it: --plugin NAME (installed: slime plugins list)"
            raise ConfigError(
                f"unknown {self.kind} '{name}'",
                code="CFG04",
                where=key,
                why=f"registered: {', '.join(names) or 'none'}",
                fix=nearest(name, names) or f"set {key} to one of these, or {others}",
            )
        return self.entries[name][0]

    def value(self, name: str) -> Any:
        """What was registered under ``name``; raises as :meth:`impl`."""
        self.impl(name)
        return self.entries[name][1]


class HookRouter:
    """Implementations by hook and task, resolved once a config and kept; ``functions`` is a `FunctionsByPath`."""

    def __init__(self, loaded: Mapping[str, LoadedPlugin], core: LoadedPlugin, functions: Any) -> None:
        self._loaded, self._core, self._functions = dict(loaded), core, functions
        self.named: dict[str, Registry] = {hook: collect(hook, [*loaded.values(), core]) for hook in NAMED_HOOKS}
        self._owners: dict[tuple[int, str, str, bool], HookImpl | None] = {}
        self._listeners: dict[tuple[int, str], list[HookImpl]] = {}
        self._configs: dict[int, Config] = {}
        self._resolved: list[Config] = []

    def owner(
        self, hook: str, task: str, config: Config, evaluation: bool = False, chosen: DataTask | None = None
    ) -> HookImpl | None:
        """The implementation of an owner hook for a task.

        Raises:
            ConfigError: CFG04 the task names a plugin that is not loaded.
            PluginError: PLG52 two implementations of equal rank, or what loading a function by path raises.
        """
        self.hold(config)
        key = (id(config), hook, task, evaluation)
        if key not in self._owners:
            self._owners[key] = self._choose(hook, task, config, evaluation, chosen)
        return self._owners[key]

    def listeners(self, hook: str, config: Config) -> list[HookImpl]:
        """All implementations of a vote or event hook: functions by path, plugins in their order, core."""
        self.hold(config)
        key = (id(config), hook)
        if key not in self._listeners:
            plugins = [*self._loaded.values(), *([self._core] if core_has_work(hook, config) else [])]
            impls = [plugin.hooks[hook] for plugin in plugins if hook in plugin.hooks]
            self._listeners[key] = [*self._functions.listeners(hook, config), *impls]
        return self._listeners[key]

    def replaces_rollout(self, task: str, config: Config, evaluation: bool) -> bool:
        """Whether `slime_rollout` makes this task's groups; core's does for offline losses alone."""
        impl = self.owner("slime_rollout", task, config, evaluation)
        if impl is None:
            return False
        return impl.provider.source != "core" or (config.train.offline and not evaluation)

    def takes_replies(self, task: str, config: Config) -> bool:
        """Whether the core's `slime_rollout` makes this task's groups, of replies that the data bring."""
        impl = self.owner("slime_rollout", task, config)
        return bool(config.train.offline and impl and impl.provider.source == "core")

    def estimator(self, train: Any) -> Estimator:
        """The estimator of a [train] section; offline losses have their own."""
        registered = self.named["slime_advantage"].value(train.estimator)
        return self._functions.estimator(registered, train)  # type: ignore[no-any-return]

    def loss(self, name: str) -> Loss:
        """The loss of that name, with functions by path applied."""
        return self._functions.loss(self.named["slime_loss"].value(name))  # type: ignore[no-any-return]

    @property
    def limit(self) -> float:
        """Seconds for a hook that no group waits for."""
        return min((config.rollout.generate_timeout for config in self._resolved), default=LONGEST)

    @property
    def check_hooks(self) -> bool:
        """Whether any stage asks to watch what hooks do."""
        return any(config.report.check_hooks for config in self._resolved)

    def hold(self, config: Config) -> None:
        """Keep a config alive, so that its id stays its own."""
        self._configs.setdefault(id(config), config)

    def resolve(self, config: Config) -> None:
        """Route and look up everything of one config, so that mistakes show before the start.

        Raises:
            ConfigError: CFG04 an unknown reward type, estimator or loss, or a task's unknown plugin.
            PluginError: PLG50 or PLG51 a function by path, PLG52 two implementations of equal rank.
        """
        self._resolved.append(config)
        for hook in OWNER_HOOKS:
            for task, evaluation in tasks_of(config):
                self.owner(hook, task, config, evaluation)
        for hook in LISTENER_HOOKS:
            self.listeners(hook, config)
        self._functions.evaluation_listeners(config)
        names = [(config.reward.rm_type, "reward.rm_type")]
        names += [(t.reward, f"reward of the task '{t.name}'") for t in declared_tasks(config) if is_name(t.reward)]
        for name, key in names:
            if name:
                self.named["slime_reward_types"].impl(name, key)
        self.estimator(config.train)
        self.loss(config.train.loss_type)

    def rows(self) -> list[dict[str, str]]:
        """``hook task provider`` of every config that was resolved."""
        rows = dict.fromkeys(row for config in self._resolved for row in self._rows(config))
        return [{"hook": hook, "task": task, "provider": provider} for hook, task, provider in rows]

    def _rows(self, config: Config) -> Iterator[tuple[str, str, str]]:
        for hook in OWNER_HOOKS:
            for task, evaluation in tasks_of(config):
                impl = self.owner(hook, task, config, evaluation)
                if impl is None or (hook == "slime_rollout" and not self.replaces_rollout(task, config, evaluation)):
                    continue
                yield hook, f"{task} (evaluation)" if evaluation else task, str(impl.provider)
        for hook in LISTENER_HOOKS:
            yield from ((hook, "*", str(impl.provider)) for impl in self.listeners(hook, config))
        names = {"slime_advantage": config.train.estimator, "slime_loss": config.train.loss_type}
        for hook, name in names.items():
            yield hook, name, str(self.named[hook].impl(name).provider)

    def _choose(
        self, hook: str, task: str, config: Config, evaluation: bool, chosen: DataTask | None
    ) -> HookImpl | None:
        declared = chosen or task_named(config, task, evaluation)
        owners = owners_of(config, self._loaded)
        inherited = "" if any(t.name == task for t in config.data.tasks) else owners.get(DEFAULT_TASK, "")
        owner = (declared.plugin if declared else "") or owners.get(task, inherited)
        from_buffer = hook == "slime_generate" and made_elsewhere(config, evaluation)
        buffer = self._loaded[BUFFER].hooks[hook] if from_buffer else None
        candidates = {
            name: plugin.hooks[hook]
            for name, plugin in self._loaded.items()
            if hook in plugin.hooks and name != BUFFER
        }
        ranks = (
            [buffer or self._functions.owner(hook, config, evaluation)],
            [self._own_choice(hook, declared, config)],
            [candidates.get(owner)],
            [impl for name, impl in candidates.items() if name != owner and name not in owners.values()],
            [self._core.hooks.get(hook)],
        )
        best = next((impls for rank in ranks if (impls := [impl for impl in rank if impl])), [])
        if len(best) > 1:
            names = [impl.provider.name for impl in best]
            raise PluginError(
                f"{' and '.join(str(impl.provider) for impl in best)} both implement {hook} for task '{task}'",
                code="PLG52",
                where=f"task '{task}'",
                why="their rank is equal, so which one would run is a matter of chance",
                fix="\n".join(f'name one: [[data.tasks]] name = "{task}", plugin = "{name}"' for name in names),
            )
        return best[0] if best else None

    def _own_choice(self, hook: str, task: DataTask | None, config: Config) -> HookImpl | None:
        path = {"slime_generate": task.generate, "slime_reward": task.reward}.get(hook, "") if task else ""
        if not path:
            return None
        if hook == "slime_reward" and is_name(path):
            return self._core.hooks[hook]  # it reads the task's name from the config
        return self._functions.owner(hook, config, False, path)  # type: ignore[no-any-return]


def owners_of(config: Config, loaded: Mapping[str, LoadedPlugin]) -> dict[str, str]:
    """Task name to the name of the plugin that owns it, for every task that has one.

    Raises:
        ConfigError: CFG04 a task names a plugin that the run does not load.
        PluginError: PLG52 several plugins could own the only task.
    """
    owners = {task.name: task.plugin for task in declared_tasks(config) if task.plugin}
    for task, plugin in owners.items():
        if plugin not in loaded:
            raise ConfigError(
                f"task '{task}' belongs to plugin '{plugin}', which this run does not load",
                code="CFG04",
                where="data.tasks or eval.eval_tasks",
                why=f"loaded: {', '.join(loaded) or 'none'}",
                fix="\n".join(filter(None, [nearest(plugin, tuple(loaded)), f"--plugin {plugin}"])),
            )
    if not config.data.tasks and not config.data.prompt_data and not config.rollout.data_source_path:
        sources = [name for name, plugin in loaded.items() if "slime_prompts" in plugin.hooks]
        if len(sources) > 1:
            raise PluginError(
                f"plugins {' and '.join(sources)} both provide prompts, and no task names one of them",
                code="PLG52",
                where="data",
                fix="\n".join(f'[[data.tasks]] name = "{name}", plugin = "{name}"' for name in sources),
            )
        if sources:
            owners[DEFAULT_TASK] = sources[0]
    return owners


def declared_tasks(config: Config) -> list[DataTask]:
    """Every task that the config declares, for training and evaluation."""
    return [*config.data.tasks, *config.eval.eval_tasks]


def task_named(config: Config, name: str, evaluation: bool = False) -> DataTask | None:
    """The declared task of that name; in evaluation an evaluation set's comes first."""
    tasks = [*config.eval.eval_tasks, *config.data.tasks] if evaluation else config.data.tasks
    return next((task for task in tasks if task.name == name), None)


def made_elsewhere(config: Config, evaluation: bool) -> bool:
    """Whether a rollout buffer makes the samples: in training, unless labels become responses."""
    return bool(config.rollout.rollout_buffer_url) and not evaluation and not config.train.offline


def is_name(reward: str) -> bool:
    """Whether a task's ``reward`` is an rm_type and not a function by path."""
    return reward != "" and ":" not in reward and "." not in reward


def tasks_of(config: Config) -> list[tuple[str, bool]]:
    """Task names with whether they are evaluated; a config without ``data.tasks`` has the one named "default"."""
    training = [(task.name, False) for task in config.data.tasks] or [(DEFAULT_TASK, False)]
    return [*training, *((task.name, True) for task in config.eval.eval_tasks)]


def collect(hook: str, plugins: Sequence[LoadedPlugin]) -> Registry:
    """Everything registered through ``hook``.

    Raises:
        PluginError: PLG52 a name is registered twice, by plugins or by the core; PLG57 something of a wrong type.
    """
    kind, key = NAMED_HOOKS[hook]
    entries: dict[str, tuple[HookImpl, Any]] = {}
    for source in (plugin.hooks[hook] for plugin in plugins if hook in plugin.hooks):
        for name, value in _entries(source, call_now(source, {}, about="the run")).items():
            if name in entries:
                core = source.provider.source == "core"  # it comes last
                raise PluginError(
                    f"the {kind} '{name}' is registered by {entries[name][0].provider} and by {source.provider}",
                    code="PLG52",
                    where=hook,
                    why="the config could not say which of them runs",
                    fix=f"rename the plugin's: name='my_{name}'" if core else "load one of the two plugins",
                )
            entries[name] = (_as_impl(source, value) if hook == "slime_reward_types" else source), value
    return Registry(kind=kind, key=key, entries=entries)


def _entries(source: HookImpl, entries: Any) -> dict[str, Any]:
    if source.hook == "slime_reward_types":
        if isinstance(entries, Mapping) and all(isinstance(n, str) and callable(f) for n, f in entries.items()):
            return dict(entries)
        raise wrong(source, f"returned {entries!r}", "the run", code="PLG57", fix="return names and functions")
    kind: type[Estimator | Loss] = Estimator if source.hook == "slime_advantage" else Loss
    return {item.name: item for item in listed(source, entries, kind, "the run", f"slime_core.{kind.__name__}")}


def _as_impl(source: HookImpl, fn: Callable[..., Any]) -> HookImpl:
    """A reward type as an implementation that takes ``sample`` and ``ctx``, whatever it calls them."""

    async def awaited(sample: Any, ctx: Any) -> Any:
        return await fn(sample, ctx)

    function = awaited if inspect.iscoroutinefunction(fn) else lambda sample, ctx: fn(sample, ctx)
    if getattr(fn, OWN_PROCESS, False):
        own_process(function)
    return replace(source, fn=function, takes=None)
