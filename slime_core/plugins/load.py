"""Load plugins by name: each is imported, and its hooks and options are checked."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_core import hookspecs
from slime_core.errors import UPDATE, ConfigError, PluginError, nearest
from slime_core.hookspecs import API_VERSION, GROUP, HOOKS, signature_of
from slime_core.plugins.boundary import CORE, CORE_FOLDER, HookImpl, Provider, call_now, wrong
from slime_core.plugins.discover import PluginInfo, find
from slime_core.plugins.files import import_file, import_place, import_text

if TYPE_CHECKING:
    from pydantic import BaseModel

MARK = "slime_impl"  # what `hookimpl` leaves on a function


@dataclass(slots=True, kw_only=True)
class LoadedPlugin:
    """A plugin that was imported, with its checked hooks."""

    provider: Provider
    target: Any  # module or object
    hooks: dict[str, HookImpl] = field(default_factory=dict)
    options: BaseModel | None = None


def load_plugin(name: str) -> LoadedPlugin:
    """Import one plugin, by its name or by the path of its file, and check its hooks.

    Raises:
        PluginError: PLG50 the import failed, PLG51 not installed, PLG52 ambiguous, PLG53 a signature, PLG54 a hook
            name, PLG55 the API version, PLG66 an async hook where none may be.
    """
    info = find(name)
    target = _import(info)
    home = _home(target)
    provider = Provider(name=info.name, origin=info.requirement, source="plugin", home=home)
    _check_api(target, provider)
    return LoadedPlugin(provider=provider, target=target, hooks=hooks_of(provider, target))


def _import(info: PluginInfo) -> Any:
    try:
        if info.target.endswith(".py"):
            return import_file(Path(info.target))
        target = metadata.EntryPoint(info.name, info.target, GROUP).load()
        return target() if inspect.isclass(target) else target
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise PluginError(
            f"plugin '{info.name}' ({info.requirement}) could not be imported: {import_text(error)}",
            code="PLG50",
            where=import_place(error) or f"distribution {info.requirement}",
            why="" if info.target.endswith(".py") else f"its entry point is {info.target}",
            fix=_import_fix(error, info),
        ) from error


def _import_fix(error: BaseException, info: PluginInfo) -> str:
    if info.target.endswith(".py"):
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        first = f"pip install {missing.split('.')[0]}" if missing else "correct the file"
        return f"{first}   (then: slime plugins check {info.target})"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(info.target.split(".")[0]):
        return f"pip install {error.name.split('.')[0]}   (or: pip install --upgrade {info.distribution})"
    return f"pip install --force-reinstall {info.distribution}   (then: slime plugins check {info.name})"


def _home(target: Any) -> Path | None:
    module = target if isinstance(target, ModuleType) else importlib.import_module(type(target).__module__)
    top = importlib.import_module(module.__name__.split(".")[0])
    file = getattr(top, "__file__", None) or getattr(module, "__file__", None)
    if file is None:
        return None
    return Path(file).parent if Path(file).name == "__init__.py" else Path(file)


def _check_api(target: Any, provider: Provider) -> None:
    version = getattr(target, "slime_api", API_VERSION)
    if version != API_VERSION:
        raise PluginError(
            f"plugin '{provider.name}' was written for hook API {version!r}, this slime has {API_VERSION}",
            code="PLG55",
            where=str(provider),
            why="`slime_api` in the plugin's module names the API that it was written for",
            fix=f"{UPDATE}; or a version of {provider.origin.split('==')[0]} for API {API_VERSION}",
        )


def hooks_of(provider: Provider, target: Any) -> dict[str, HookImpl]:
    """Every hook that ``target`` implements, checked; pluggy marks them, and neither checks nor calls them.

    Raises:
        PluginError: PLG53, PLG54 or PLG66.
    """
    _check_names(provider, target)
    hooks: dict[str, HookImpl] = {}
    for name, fn in _marked(target):
        marks = getattr(inspect.unwrap(fn), MARK)
        if marks.get("wrapper") or marks.get("hookwrapper"):
            raise PluginError(
                f"{provider.name}.{name} is a hook wrapper",
                code="PLG53",
                where=f"{provider} at {line_of(fn)}",
                why="hooks may be async, and a wrapper would get the coroutine in place of the value",
                fix="remove wrapper=True",
            )
        hook = marks.get("specname") or name
        hooks[hook] = hook_impl(provider, hook, fn)
    return hooks


def hook_impl(provider: Provider, hook: str, fn: Callable[..., Any]) -> HookImpl:
    """The implementation of a hook, whose signature fits.

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
        raise PluginError(f"{provider.name}.{hook} yields; a hook returns its value", code="PLG66", where=where)
    return HookImpl(provider=provider, hook=hook, fn=fn, takes=None if takes_all else frozenset(named) & expected)


def line_of(fn: Callable[..., Any]) -> str:
    """``file:line`` of a function, or its name where it has no source."""
    code = getattr(inspect.unwrap(fn), "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)


def _marked(target: Any) -> list[tuple[str, Any]]:
    members = ((name, inspect.getattr_static(target, name, None)) for name in dir(target))
    return [
        (name, getattr(target, name))
        for name, raw in members
        if inspect.isroutine(raw) and hasattr(inspect.unwrap(getattr(raw, "__func__", raw)), MARK)
    ]


def _check_names(provider: Provider, target: Any) -> None:
    marked = {name: getattr(inspect.unwrap(fn), MARK).get("specname") or name for name, fn in _marked(target)}
    for name, hook in marked.items():
        if hook not in HOOKS:
            raise PluginError(
                f"plugin '{provider.name}' implements '{hook}', which is not a hook",
                code="PLG54",
                where=f"{provider} at {line_of(getattr(target, name))}",
                fix="\n".join(filter(None, [nearest(hook, set(HOOKS)), "all hooks: slime plugins hooks"])),
            )
    for hook in set(HOOKS) - set(marked):
        fn = getattr(target, hook, None)
        if inspect.isfunction(fn) and fn.__module__ == getattr(target, "__name__", None):
            raise PluginError(
                f"plugin '{provider.name}' defines {hook} without the decorator, so it would never be called",
                code="PLG54",
                where=f"{provider} at {line_of(fn)}",
                fix="write @slime_core.hookimpl above it",
            )


def options_model(loaded: LoadedPlugin) -> type[BaseModel] | None:
    """The plugin's own model of ``[plugin.NAME]``, None where it has no options.

    Raises:
        PluginError: PLG56 or PLG57 from `slime_options` itself.
    """
    declared = loaded.hooks.get("slime_options")
    if declared is None:
        return None
    model = call_now(declared, {}, about="its options")
    from pydantic import BaseModel

    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise wrong(declared, f"returned {model!r}", "its options", code="PLG57", fix="return a pydantic model class")
    return model


def load_options(loaded: LoadedPlugin, table: Mapping[str, Any]) -> BaseModel | None:
    """The plugin's ``[plugin.NAME]`` table as its own model.

    Raises:
        ConfigError: CFG01, 02, 03 or 15, as for a core key.
        PluginError: PLG56 or PLG57 from `slime_options` itself.
    """
    from slime_core.config.validate import validate_options

    return validate_options(loaded.provider.name, options_model(loaded), table)


def core_plugin(target: Any) -> LoadedPlugin:
    """Core's own plugin, registered through the same hooks; it has the lowest rank."""
    provider = Provider(name=CORE, origin="slime-rl", source="core", home=Path(CORE_FOLDER))
    return LoadedPlugin(provider=provider, target=target, hooks=hooks_of(provider, target))


def recipe_of(loaded: LoadedPlugin, recipe: str) -> Path:
    """The file of one of a plugin's recipes.

    Raises:
        ConfigError: CFG05 no such recipe, or its file is missing.
    """
    name, declared = loaded.provider.name, loaded.hooks.get("slime_recipes")
    recipes: Mapping[str, Path] = call_now(declared, {}, about="its recipes") if declared else {}
    if recipe not in recipes:
        raise ConfigError(
            f"plugin '{name}' has no recipe '{recipe}'",
            code="CFG05",
            where=str(loaded.provider),
            why=f"it has: {', '.join(recipes) or 'none'}",
            fix=nearest(recipe, tuple(recipes)) or f"slime run RECIPE.toml --plugin {name}",
        )
    path = Path(recipes[recipe])
    if not path.is_file():
        raise ConfigError(
            f"recipe '{recipe}' of plugin '{name}' is missing: {path}", code="CFG05", where=str(loaded.provider)
        )
    return path


def fingerprint(loaded: Mapping[str, LoadedPlugin], routing: list[dict[str, str]], files: Iterable[Path]) -> str:
    """A checksum of names, versions, hooks, routing, and the bytes of every source file of plugins and functions."""
    facts = {
        "api": API_VERSION,
        "plugins": [[name, plugin.provider.origin, sorted(plugin.hooks)] for name, plugin in loaded.items()],
        "routing": routing,
        "sources": _checksum([*_package_files(loaded.values()), *sorted(files)], 16),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def sources(loaded: Mapping[str, LoadedPlugin], files: Iterable[Path]) -> dict[str, str]:
    """A checksum of each plugin's source files by ``plugin NAME``, and of each file of functions by its path."""
    checksums = {f"plugin {name}": _checksum(_package_files([plugin]), 8) for name, plugin in loaded.items()}
    for file in sorted(files):
        checksums[str(file)] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return checksums


def _checksum(files: Iterable[Path], size: int) -> str:
    """Of names and bytes, ``size`` bytes in hexadecimal."""
    digest = hashlib.blake2b(digest_size=size)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _package_files(plugins: Iterable[LoadedPlugin]) -> list[Path]:
    files: list[Path] = []
    for home in (plugin.provider.home for plugin in plugins):
        if home is not None:
            files += sorted(home.rglob("*.py")) if home.is_dir() else [home]
    return files
