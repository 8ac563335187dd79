"""Installed plugins, read from the metadata of distributions: nothing of a plugin is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

from slime_core.errors import PluginError, nearest
from slime_core.hookspecs import GROUP


@dataclass(slots=True, frozen=True, kw_only=True)
class PluginInfo:
    """One entry point of the group ``slime.plugins``.

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
        """``distribution==version``."""
        return f"{self.distribution}=={self.version}"

    def as_dict(self) -> dict[str, object]:
        """Stable keys, as `slime plugins list --json` prints them."""
        return asdict(self) | {"conflicts": list(self.conflicts)}


def available() -> list[PluginInfo]:
    """Every installed plugin, by name; of two with one name both are listed, each naming the other."""
    found = set(_entries())
    return [
        PluginInfo(
            name=name,
            version=version,
            distribution=dist,
            target=target,
            conflicts=tuple(sorted({d for n, _, d, _ in found if n == name and d != dist})),
        )
        for name, target, dist, version in sorted(found)
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
    """The one installed plugin of that name.

    Raises:
        PluginError: PLG51 none is installed, PLG52 several distributions declare it.
    """
    installed = available()
    named = [info for info in installed if info.name == name]
    if not named:
        names = sorted({info.name for info in installed})
        guess = name.replace("_", "-")
        hint = nearest(name, names)
        raise PluginError(
            f"no plugin named '{name}' is installed",
            code="PLG51",
            where=f"plugin '{name}'",
            why=f"installed: {', '.join(names) or 'none'}",
            fix="\n".join([*([hint] if hint else []), f"pip install slime-{guess}   (then: slime plugins list)"]),
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
