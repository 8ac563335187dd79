"""Commands that install what an extra of slime-rl needs: they work whether slime came from a clone or from wheels."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "slime-rl"
UPDATE = "update slime: git pull in its clone, or install its newer wheels"


def install_line(extra: str) -> str:
    """``pip install "aiohttp>=3.10" ...``: what ``extra`` and slime's own package behind it need of others.

    Those of ``fsdp`` are named for that extra alone.

    Example: install_line("sglang") == 'pip install "aiohttp>=3.10" "orjson>=3.9"'
    """
    needed = needs(DISTRIBUTION)
    if not needed:
        return f'pip install -e ".[{extra}]"   in a clone of slime'
    names = needed.get(f'extra == "{extra}"', [])
    for package in [name for name in names if name.startswith("slime-")]:
        names += needs(re.split(r"[^\w-]", package)[0]).get("", [])
    common = [*needed.get("", []), *([] if extra == "fsdp" else needed.get('extra == "fsdp"', []))]
    known = ("slime-", "editables")  # the second is of editable installs
    others = [f'"{name}"' for name in dict.fromkeys(names) if name not in common and not name.startswith(known)]
    return f"pip install {' '.join(others)}"


def needs(distribution: str) -> dict[str, list[str]]:
    """Requirements of an installed distribution by their marker; empty where it is not installed."""
    try:
        rows = [row.partition(";") for row in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for name, _, marker in rows:
        found.setdefault(marker.replace("'", '"').strip(), []).append(name.strip())
    return found
