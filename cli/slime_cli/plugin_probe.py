"""Inspection of a plugin in a separate process: its hooks, options and recipes, or its load error.

python -m slime_cli.plugin_probe NAME FILE       the parent reads FILE; the plugin may print anything
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime_core.errors import SlimeError

SECONDS = 120.0
LINES = 5


def probe(name: str) -> dict[str, Any]:
    """``hooks``, ``options`` and ``recipes`` of a plugin, or ``error``."""
    result: dict[str, Any] = in_process("slime_cli.plugin_probe", name)
    return result


def in_process(module: str, name: str, timeout: float = SECONDS) -> Any:
    """What ``python -m module NAME FILE`` writes into FILE; a process that dies is an ``error``, like any other."""
    with tempfile.TemporaryDirectory(prefix="slime-plugin-") as folder:
        out = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, name, str(out)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return _died(name, f"it took longer than {timeout:g} s", "")
        if out.is_file():
            return json.loads(out.read_text())
        last = done.stderr.decode(errors="replace").strip().splitlines()[-LINES:]
        return _died(name, f"its process ended with code {done.returncode}", "\n".join(last))


def _died(name: str, what: str, why: str) -> dict[str, Any]:
    return {
        "error": {
            "code": "PLG50",
            "what": f"plugin '{name}' could not be looked at: {what}",
            "where": f"plugin '{name}'",
            "why": why,
            "fix": f"python -m slime_cli.plugin_probe {name} out.json   (shows all that it prints)",
        }
    }


def look(name: str) -> dict[str, Any]:
    """Load the plugin here."""
    from slime_core.plugins.boundary import call_now
    from slime_core.plugins.load import load_plugin, options_model

    try:
        loaded = load_plugin(name)
        model = options_model(loaded)
        declared = loaded.hooks.get("slime_recipes")
        recipes = dict(call_now(declared, {}, about="its recipes")) if declared else {}
    except SlimeError as error:
        return {"error": error.as_dict()}
    fields = model.model_fields if model is not None else {}
    return {
        "hooks": sorted(loaded.hooks),
        "options": [
            {
                "key": f"plugin.{loaded.provider.name}.{key}",
                "type": getattr(info.annotation, "__name__", str(info.annotation)),
                "default": None if info.is_required() else repr(info.get_default(call_default_factory=True)),
                "description": info.description or "",
            }
            for key, info in fields.items()
        ],
        "recipes": {recipe: str(path) for recipe, path in recipes.items()},
        "home": str(loaded.provider.home),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(look(sys.argv[1])))
