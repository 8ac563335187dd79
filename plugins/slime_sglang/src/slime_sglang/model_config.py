"""A model folder's config.json as it is written; nothing is imported to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw_config(model: str) -> dict[str, Any]:
    """config.json of a model folder; empty where it is not on this machine."""
    try:
        raw = json.loads((Path(model).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
