"""Ray's runtime environment: wheels, packages and variables for machines that lack them.

    slime_mine-1.0-py3-none-any.whl --unpacked here--> slime_mine/, slime_mine-1.0.dist-info/ --Ray--> a folder on
    every machine, first on the path of hosts and of all that they start

Ray would hand a wheel to pip, which asks an index for its requirements; here nothing is installed and no index
is asked.
"""

from __future__ import annotations

import configparser
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.hookspecs import GROUP

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins

KEY = "cluster.ray_py_modules"
LIBRARIES = ("purelib", "platlib")
"""Folders of a wheel's ``.data`` whose content belongs beside its packages; the others hold no modules."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Wheel:
    """What a wheel says of itself.

    Example: Wheel(path=Path("dist/slime_mine-1.0-py3-none-any.whl"), name="slime-mine", version="1.0",
                   plugins={"mine": "slime_mine.plugin"})
    """

    path: Path
    name: str
    version: str
    plugins: Mapping[str, str]  # entry points of the group `slime.plugins`


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's metadata; nothing of it is imported.

    Raises:
        ConfigError: CFG19 it is no wheel.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            info = _info_of(archive)
            metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
            points = f"{info}/entry_points.txt"
            text = archive.read(points).decode() if points in archive.namelist() else ""
        name, version = metadata["Name"], metadata["Version"]
        if not name or not version:
            raise ValueError("its METADATA names no distribution and version")
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        plugins = dict(parser.items(GROUP)) if parser.has_section(GROUP) else {}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, configparser.Error) as error:
        raise ConfigError(
            f"{path.name} is not a wheel",
            code="CFG19",
            where=f"{KEY}: {path}",
            why=str(error),
            fix="python -m build --wheel PLUGIN_FOLDER   makes one; a folder must be a package",
        ) from error
    return Wheel(path=path, name=name, version=version, plugins=plugins)


def check_travelling(config: Config, plugins: Plugins) -> list[str]:
    """Check that wheels contain what this process has loaded; return notices.

    Raises:
        ConfigError: CFG19 no wheel, or another version of a plugin that the run uses.
    """
    from slime_core.plugins import find

    lines, names = [], set()
    for wheel in map(read_wheel, _wheels(config)):
        for name in wheel.plugins:
            if name not in plugins.names:
                lines.append(f"notice: {wheel.path.name} contains the plugin {name}, which the run does not use")
                continue
            names.add(name)
            local = find(name)
            if (local.distribution, local.version) != (wheel.name, wheel.version):
                raise ConfigError(
                    f"{wheel.path.name} contains another {name} than the one this process has loaded",
                    code="CFG19",
                    where=f"{KEY}: {wheel.path}",
                    why=f"{wheel.name}=={wheel.version} is in the wheel, {local.requirement} is installed here",
                    fix=f"pip install {wheel.path}   or build the wheel again",
                )
    if names:
        lines.append(f"plugins that travel: {', '.join(sorted(names))}")
    return lines


@contextmanager
def travelling(config: Config) -> Iterator[dict[str, Any]]:
    """Ray's runtime environment of a run, empty where nothing travels; enter the cluster inside the block.

    Raises:
        ConfigError: CFG19 no wheel.
    """
    cluster = config.cluster
    env: dict[str, Any] = {"env_vars": dict(cluster.ray_env_vars)} if cluster.ray_env_vars else {}
    if not cluster.ray_py_modules:
        yield env
        return
    with tempfile.TemporaryDirectory(prefix="slime-travelling-") as folder:
        modules: list[str] = []
        for number, path in enumerate(map(Path, cluster.ray_py_modules)):
            modules += map(str, unpack(path, Path(folder) / str(number)) if path.suffix == ".whl" else [path])
        yield {**env, "py_modules": modules}


def unpack(wheel: Path, folder: Path) -> Sequence[Path]:
    """A wheel's packages, modules and metadata as pip would lay them out; what lies in the folder then.

    Raises:
        ConfigError: CFG19 it is no wheel.
    """
    read_wheel(wheel)
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            place = _place(PurePosixPath(member.filename))
            if place is not None and not member.is_dir():
                member.filename = str(place)
                archive.extract(member, folder)
    return sorted(folder.iterdir())


def _place(name: PurePosixPath) -> PurePosixPath | None:
    """Where a file of a wheel goes; None for one that is no part of a library."""
    if not name.parts or not name.parts[0].endswith(".data"):
        return name
    inside = len(name.parts) > 2 and name.parts[1] in LIBRARIES
    return PurePosixPath(*name.parts[2:]) if inside else None


def _info_of(archive: zipfile.ZipFile) -> str:
    """The name of its ``.dist-info`` folder."""
    names = {name.split("/")[0] for name in archive.namelist() if name.split("/")[0].endswith(".dist-info")}
    if len(names) != 1:
        raise ValueError(f"it has {len(names)} .dist-info folders instead of one")
    return names.pop()


def _wheels(config: Config) -> list[Path]:
    return [path for path in map(Path, config.cluster.ray_py_modules) if path.suffix == ".whl"]


def not_set_up(error: Exception) -> ConfigError:
    """The error of a machine on which Ray could not make the runtime environment."""
    return ConfigError(
        "a machine of the Ray cluster cannot take what travels with the run",
        code="CFG19",
        where=f"{KEY}, cluster.ray_env_vars",
        why=" ".join(str(error).split())[:600],
        fix="look at runtime_env_setup-*.log of Ray's session there, or install the plugins on each machine instead",
    )
