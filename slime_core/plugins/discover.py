"""Installed plugins, read from the metadata of distributions: nothing of a plugin is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from slime_core.errors import PluginError, nearest
from slime_core.hookspecs import GROUP

OURS = {
    "diagnose": ("slime_diagnose",),
    "kernelbench": ("slime_sandbox", "slime_service", "slime_kernelbench"),
    "models": ("slime_models",),
    "rm_math": ("slime_rm_math",),
    "sandbox": ("slime_sandbox",),
    "watch": ("slime_report", "slime_service", "slime_watch"),
}
"""Plugins of slime's own repository, and the folders below plugins/ that each needs: an index has none of them."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginInfo:
    """One entry point of the group ``slime.plugins``, or a plugin in one file, whose target is that file.

    Example:
        PluginInfo(name="rm_math", version="0.1.0", distribution="slime-rm-math", target="slime_rm_math.plugin")
    """

    name: str
    version: str
    distribution: str
    target: str  # module, or module:attribute
    conflicts: tuple[str, ...] = ()  # other distributions that declare the same name

    @property
    def requirement(self) -> str:
        """``distribution==version``; of a file its path."""
        return f"{self.distribution}=={self.version}" if self.version else self.distribution

    def as_dict(self) -> dict[str, object]:
        """Stable keys, as `slime plugins list --json` prints them."""
        return asdict(self) | {"conflicts": list(self.conflicts)}


def available() -> list[PluginInfo]:
    """Every installed plugin, by name; of two with one name both are listed, each naming the other."""
    return list(_available(paths()))


def paths() -> tuple[tuple[str, int], ...]:
    """Where packages are looked for, and when something was last installed there."""
    folders = ((folder, Path(folder or ".")) for folder in sys.path)
    return tuple((folder, path.stat().st_mtime_ns if path.exists() else 0) for folder, path in folders)


@lru_cache(maxsize=1)
def _available(_: object) -> list[PluginInfo]:
    entry_points = set(_entries())
    return [
        PluginInfo(
            name=name,
            version=version,
            distribution=dist,
            target=target,
            conflicts=tuple(sorted({d for n, _, d, _ in entry_points if n == name and d != dist})),
        )
        for name, target, dist, version in sorted(entry_points)
    ]


def _entries() -> Iterator[tuple[str, str, str, str]]:
    """Name, target, distribution and version of each entry point of ours.

    Read line by line, because one distribution whose metadata is damaged, whoever's it is, makes
    ``importlib.metadata.entry_points`` fail for all.
    """
    for dist in metadata.distributions():
        text = _text_of(dist)
        if GROUP not in text:
            continue
        name, version = _identity(dist)
        if _is_shadowed(name, text):
            continue
        section = ""
        for line in map(str.strip, text.splitlines()):
            key, equals, value = line.partition("=")
            if line.startswith("["):
                section = line.strip("[]").strip()
            elif section == GROUP and equals and not line.startswith(("#", ";")):
                yield key.strip(), value.strip(), name, version


def _text_of(dist: metadata.Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _identity(dist: metadata.Distribution) -> tuple[str, str]:
    try:
        return dist.metadata["Name"] or "unknown", dist.metadata["Version"] or "unknown"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "unknown", "unknown"


def _is_shadowed(name: str, text: str) -> bool:
    """Whether another copy of the distribution comes first on the path, so that this one is not what is imported."""
    try:
        return _text_of(metadata.distribution(name)) != text
    except (metadata.PackageNotFoundError, ValueError):
        return False


def find(name: str) -> PluginInfo:
    """The one installed plugin of that name, or the one in the file that ``name`` is the path of.

    Raises:
        PluginError: PLG51 none is installed or there is no such file, PLG52 several distributions declare it.
    """
    if name.endswith(".py") or "/" in name:
        return _in_file(Path(os.path.normpath(Path(name).expanduser().absolute())))
    installed = available()
    named = [info for info in installed if info.name == name]
    if not named:
        names = sorted({info.name for info in installed})
        hint = nearest(name, names)
        folders = " ".join(f"-e plugins/{folder}" for folder in OURS.get(name, ()))
        install = f"pip install {folders}   in a clone of slime" if folders else ""
        others = (
            f"install the package that provides it (then: slime plugins list), or name a file: --plugin ./{name}.py"
        )
        raise PluginError(
            f"no plugin named '{name}' is installed",
            code="PLG51",
            where=f"plugin '{name}'",
            why=f"installed: {', '.join(names) or 'none'}",
            fix="\n".join([*([hint] if hint else []), install or others]),
        )
    if len(named) > 1:
        both = " and ".join(f"{info.requirement} ({info.target})" for info in named)
        raise PluginError(
            f"the plugin name '{name}' is declared {len(named)} times, by {both}",
            code="PLG52",
            where=f"plugin '{name}'",
            why="neither is taken: which one would run is a matter of chance",
            fix="\n".join(f"pip uninstall {info.distribution}" for info in named),
        )
    return named[0]


def _in_file(path: Path) -> PluginInfo:
    if path.is_file() and path.suffix == ".py" and path.stem.isidentifier():
        return PluginInfo(name=path.stem, version="", distribution=str(path), target=str(path))
    files = sorted(file.name for file in path.parent.glob("*.py"))
    if path.is_dir():
        message, fix = f"{path} is a folder", f"pip install -e {path}   (then: slime plugins list)"
    elif path.is_file():
        message, fix = (
            f"{path.name} is not a name of a Python module",
            "give the file a name of a to z, 0 to 9 and _, .py",
        )
    else:
        message, fix = f"there is no file {path}", nearest(path.name, files) or "correct the path"
    raise PluginError(
        f"no plugin is at this path: {message}",
        code="PLG51",
        where=f"plugin '{path}'",
        why="a plugin is a Python file, or the name of an installed one",
        fix=fix,
    )
