"""Write a new plugin package: the files of a folder of `templates`, with its names filled in."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".template"
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def write_plugin(name: str, parent: Path, kind: str = "plugin") -> dict[str, Any]:
    """Write the package into ``parent/slime-NAME``; ``folder``, ``distribution``, ``package`` and ``files``.

    ``kind`` is plugin, engine or trainer; the name of a backend is also that of a table of recipes.

    Raises:
        ConfigError: CFG03 an unusable name, CFG12 the folder is there already.
    """
    from slime_cli.main import COMMANDS
    from slime_core.config.schema import Config
    from slime_core.plugins.backends import BROUGHT_BY

    if name in COMMANDS:
        raise ConfigError(
            f"a plugin cannot be called '{name}'",
            code="CFG03",
            where="command line: NAME",
            why=f"`slime {name}` is a command of slime, so the plugin's own could not be called",
            fix=f"take another name, such as my_{name}",
        )
    if kind != "plugin" and name in {*Config.model_fields, *BROUGHT_BY, "local", "fsdp"}:
        raise ConfigError(
            f"{'an engine' if kind == 'engine' else 'a trainer'} cannot be called '{name}'",
            code="CFG03",
            where="command line: NAME",
            why=f"slime has a table or a backend of that name: its own table [{name}] would clash with it",
            fix=f"take another name, such as my_{name}",
        )
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in ("core", "cli", "main"):
        raise ConfigError(
            f"a plugin cannot be called '{name}'",
            code="CFG03",
            where="command line: NAME",
            why="it becomes the package slime_NAME, the table [plugin.NAME] and the command slime NAME",
            fix="use a to z, 0 to 9 and _, beginning with a letter",
        )
    names = {"@NAME@": name, "@PACKAGE@": f"slime_{name}", "@DIST@": f"slime-{name.replace('_', '-')}"}
    folder = (parent / names["@DIST@"]).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is there already", code="CFG12", where=str(folder), fix="choose another name or --dir"
        )
    template, files = TEMPLATES / kind, []
    for source in sorted(path for path in template.rglob("*") if path.is_file()):
        target = folder / _filled(source.relative_to(template).as_posix().removesuffix(SUFFIX), names)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(source.read_text(), names))
        files.append(target.relative_to(folder).as_posix())
    return {"folder": str(folder), "distribution": names["@DIST@"], "package": names["@PACKAGE@"], "files": files}


def _filled(text: str, names: dict[str, str]) -> str:
    for mark, value in names.items():
        text = text.replace(mark, value)
    return text
