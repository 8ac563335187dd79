"""Engines, trainers and clusters by name: what `rollout_engine`, `train_backend` and `cluster_backend` choose.

The hooks `slime_engine`, `slime_trainer` and `slime_cluster` bring them. A name is looked up in the core, in the
plugins that the run loads, and in the installed plugin of that name, which needs no `--plugin`. Nothing else in slime
compares a backend's name with a string.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import fields, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.backends import Backend, ClusterBackend, EngineBackend, TrainerBackend
from slime_core.config.problems import Problem, conflict
from slime_core.errors import ConfigError, PluginError, SlimeError, install_line, nearest, text_of
from slime_core.plugins.discover import available, paths

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins.boundary import Provider
    from slime_core.plugins.load import LoadedPlugin

CORE = "slime_core.clusters"  # of a higher layer, loaded by name like every plugin

BROUGHT_BY = {"sglang": "slime-sglang", "megatron": "slime-megatron", "ray": "slime-ray"}
"""Backends of slime's own repository: the distribution of each. Its extra of slime-rl has the backend's name."""

BUFFER = "buffer"  # the plugin that `rollout_buffer_url` needs

COMPAT = "compat"  # the plugin that functions by path need where they ask for slime's modules or servers

TRACKERS = "trackers"  # the plugin whose table loads it, and whose keys are flags of every run

PACKAGES = {
    **BROUGHT_BY,
    BUFFER: "slime-buffer",
    COMPAT: "slime-compat",
    "convert": "slime-convert",
    "diagnose": "slime-diagnose",
    "report": "slime-report",
    "watch": "slime-watch",
    TRACKERS: "slime-trackers",
}
"""Plugins of slime's own repository that a config or a command may need: the distribution of each."""

KEYS = {
    "slime_engine": "rollout.rollout_engine",
    "slime_trainer": "train.train_backend",
    "slime_cluster": "cluster.cluster_backend",
}
"""Hook -> the key that names one of what it brings."""

BRINGS = "install the package that provides it (then: slime plugins list)"

KINDS: dict[str, type[Any]] = {
    "slime_engine": EngineBackend,
    "slime_trainer": TrainerBackend,
    "slime_cluster": ClusterBackend,
}

B = TypeVar("B", EngineBackend, TrainerBackend, ClusterBackend)
Blame = Callable[[], AbstractContextManager[None]]

ENTERED = frozenset({"start", "serve", "parts"})  # return async context managers
LISTED = frozenset({"problems", "rules", "notices"})  # may be generators


def engine_of(config: Config) -> EngineBackend:
    """The engine that ``rollout.rollout_engine`` names.

    Raises:
        ConfigError: CFG04 no installed package provides it.
        PluginError: PLG50 to PLG57 its package does not load; PLG52 two packages bring it.
    """
    return named("slime_engine", config.rollout.rollout_engine, config.plugins, EngineBackend)


def trainer_of(config: Config) -> TrainerBackend:
    """The trainer that ``train.train_backend`` names; raises as :func:`engine_of`."""
    return named("slime_trainer", config.train.train_backend, config.plugins, TrainerBackend)


def cluster_of(config: Config) -> ClusterBackend:
    """The cluster that ``cluster.cluster_backend`` names; raises as :func:`engine_of`."""
    return named("slime_cluster", config.cluster.cluster_backend, config.plugins, ClusterBackend)


def unread(config: Config) -> list[str]:
    """Tables of a config whose packages are not installed, and which no key names."""
    names = {config.rollout.rollout_engine, config.train.train_backend, config.cluster.cluster_backend}
    return [name for name in config.tables if name in BROUGHT_BY and name not in names and not is_installed(name)]


def chosen(config: Config) -> tuple[Backend, ...]:
    """The config's engine, trainer and cluster; raises as :func:`engine_of`."""
    return engine_of(config), trainer_of(config), cluster_of(config)


def backend_problems(config: Config) -> Iterator[Problem]:
    """What cannot hold with the config's engine, trainer and cluster; raises as :func:`engine_of`."""
    for key, backend in zip(KEYS.values(), chosen(config), strict=True):
        yield from backend.rules(config)
        library, name = backend.library, key.rpartition(".")[2]
        if library and (find_spec(library.partition(".")[0]) is None or find_spec(library) is None):
            remedy = (
                install_line(backend.name) if backend.name in BROUGHT_BY else f"pip install the package of {library}"
            )
            message = f"{name} = {backend.name}, but {library} is not installed here"
            yield conflict(message, [key], fix=f"{remedy}   or leave {name} out")


def implied(config: Config) -> tuple[str, ...]:
    """Plugins that keys need; they are loaded without ``--plugin``.

    Raises:
        ConfigError: CFG04 one is not installed.
    """
    needs: dict[str, tuple[Any, str]] = {
        BUFFER: (config.rollout.rollout_buffer_url, "rollout.rollout_buffer_url"),
        TRACKERS: (config.plugin.get(TRACKERS), f"plugin.{TRACKERS}"),
    }
    names = [name for name, (value, _) in needs.items() if value]
    for name in names:
        if not is_installed(name):
            raise absent(needs[name][1].removeprefix("rollout."), name, needs[name][1])
    return tuple(names)


@lru_cache(maxsize=1)
def _tracker_keys(_: object) -> Mapping[str, Any]:
    from slime_core.plugins.load import load_plugin, options_model

    try:
        model = options_model(load_plugin(TRACKERS))
    except PluginError:  # an error where a run uses it
        return {}
    return {name: info.annotation for name, info in model.model_fields.items()} if model is not None else {}


def tracker_keys() -> Mapping[str, Any]:
    """Keys of [plugin.trackers] with the types of their values; none where it is not installed or does not load."""
    return _tracker_keys(paths()) if is_installed(TRACKERS) else {}


def named(hook: str, name: str, plugins: Sequence[str], kind: type[B]) -> B:
    """The backend of that name; raises as :func:`engine_of`."""
    core = {backend.name: backend for backend in getattr(import_module(CORE), hook)()}
    if name in core:  # a plugin that brings it too is refused where plugins are loaded: `check_names`
        return core[name]  # type: ignore[no-any-return]
    by_name: dict[str, B] = {}
    for entry in dict.fromkeys([*plugins, *([name] if is_installed(name) else [])]):
        try:
            origin, backends = offered(hook, entry)
        except PluginError as error:
            raise _unusable(error, f"{KEYS[hook]} = {name}", KEYS[hook]) from error
        if backend := next((backend for backend in backends if backend.name == name), None):
            by_name[origin] = backend
    if len(by_name) > 1:
        raise twice(hook, name, list(by_name))
    if by_name:
        return next(iter(by_name.values()))
    raise missing(hook, name, sorted(core))


def _unusable(error: PluginError, what: str, key: str) -> PluginError:
    """The error of a plugin that a key of the config names."""
    where = f"{key}, {error.where}" if error.where else key
    return PluginError(f"{what}: {error.what}", code=error.code, where=where, why=error.why, fix=error.fix)


def twice(hook: str, name: str, origins: Sequence[str]) -> PluginError:
    """That several packages bring a backend of one name."""
    return PluginError(
        f"{KEYS[hook]} = {name} is provided by {' and by '.join(origins)}",
        code="PLG52",
        where=KEYS[hook],
        why="neither is taken: which one would run is a matter of chance",
        fix="load one of the two (plugins, --plugin), or rename one",
    )


def check_names(loaded: Iterable[LoadedPlugin]) -> None:
    """Refuse a backend of a run's plugins that the core, or another of them, brings too.

    Raises:
        PluginError: PLG52; PLG56, PLG57 a hook fails or returns something else.
    """
    core = import_module(CORE)
    owners = {(hook, backend.name): "slime-rl" for hook in KEYS for backend in getattr(core, hook)()}
    for plugin in loaded:
        for hook, kind in KINDS.items():
            for backend in offers(plugin, hook, kind):
                origin = owners.setdefault((hook, backend.name), plugin.provider.origin)
                if origin != plugin.provider.origin:
                    raise twice(hook, backend.name, [origin, plugin.provider.origin])


def missing(hook: str, name: str, packages: Sequence[str]) -> ConfigError:
    """That nothing brings a backend; which package would, or the nearest name."""
    key = KEYS[hook]
    if name in BROUGHT_BY:
        return absent(f"{key} = {name}", name, key)
    names = [*packages, *(other for other in BROUGHT_BY if is_installed(other))]
    return ConfigError(
        f"{key} = {name}: no installed package provides it",
        code="CFG04",
        where=key,
        why=f"there are: {', '.join(packages)}, and those of installed plugins",
        fix=nearest(name, names) or f"set {key} to {' or '.join(packages)}, or {BRINGS}",
    )


def absent(what: str, name: str, where: str) -> ConfigError:
    """That a plugin of slime's own repository is not installed."""
    package = PACKAGES[name]
    message = f"{what}: {package} is not installed here"
    return ConfigError(message, code="CFG04", where=where, why=f"{package} provides it", fix=install(name))


def install(name: str) -> str:
    """How a backend of slime's own repository is installed."""
    return f"pip install -e plugins/slime_{name}   in a clone of slime, or its wheel"


def is_installed(name: str) -> bool:
    """Whether a plugin of that name is installed; nothing is imported."""
    return any(info.name == name for info in available())


def offered(hook: str, plugin: str) -> tuple[str, list[Any]]:
    """A plugin's origin, and what it brings by ``hook``; called once while nothing else is installed.

    Raises:
        PluginError: PLG50 to PLG55 it does not load; PLG56, PLG57 its hook fails or returns something else.
    """
    return _kept(hook, plugin, paths()) if is_installed(plugin) else _offered(hook, plugin)  # a file may change


def _offered(hook: str, plugin: str, _: object = None) -> tuple[str, list[Any]]:
    from slime_core.plugins.load import load_plugin

    loaded = load_plugin(plugin)
    return loaded.provider.origin, offers(loaded, hook, KINDS[hook])


_kept = lru_cache(maxsize=64)(_offered)


def offers(loaded: LoadedPlugin, hook: str, kind: type[B]) -> list[B]:
    """What a loaded plugin brings by ``hook``; its functions raise errors that name the package.

    Raises:
        PluginError: PLG56, PLG57 its hook fails or returns something else.
    """
    from slime_core.plugins.boundary import call_now, listed

    declared = loaded.hooks.get(hook)
    if declared is None:
        return []
    value, name = call_now(declared, {}, about="the run"), f"slime_core.backends.{kind.__name__}"
    backends = listed(declared, value, kind, "the run", name)
    return [_guarded(backend, loaded.provider, KEYS[hook]) for backend in backends]


def _guarded(backend: B, provider: Provider, key: str) -> B:
    """The backend with functions that raise PLG56 in place of anything that is no SlimeError."""
    changes: dict[str, Any] = {}
    for field in fields(backend):
        function = getattr(backend, field.name)
        if callable(function) and not inspect.isclass(function):
            blame = partial(_blamed, provider, key, backend.name, field.name)
            if field.name in ENTERED:
                changes[field.name] = _entered(function, blame)
            else:
                changes[field.name] = blame()(partial(_listed, function) if field.name in LISTED else function)
    return replace(backend, **changes)


@contextmanager
def _blamed(provider: Provider, key: str, backend: str, function: str) -> Iterator[None]:
    """Raise PLG56 for what a function of a backend raises inside."""
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        name = provider.name if "==" in provider.origin else provider.origin
        raise PluginError(
            f"{key} = {backend}: {provider.origin} failed in `{function}`: {text_of(error)}",
            code="PLG56",
            where=f"{key}, {frame.filename}:{frame.lineno}",
            fix=f"slime plugins check {name}   or leave {key} out",
        ) from error


def _listed(function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    return tuple(function(*args))


def _entered(function: Callable[..., Any], blame: Blame) -> Callable[..., Any]:
    """A function that returns an async context manager; what the block inside raises passes."""

    @asynccontextmanager
    async def enter(*args: Any, **keywords: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with blame():
                value = await stack.enter_async_context(function(*args, **keywords))
            yield value

    return enter


def brought_by(plugin: str) -> list[Backend]:
    """All backends of a plugin; none of one that does not load, which is an error where it is used."""
    try:
        return [backend for hook in KINDS for backend in offered(hook, plugin)[1]]
    except SlimeError:
        return []
