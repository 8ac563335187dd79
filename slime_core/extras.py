"""Commands that install what an extra of slime-rl needs: they work whether slime came from a clone or from wheels."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "slime-rl"
UPDATE = "update slime: git pull in its clone, or install its newer wheels"


def install_line(extra: str) -> str:
    """``pip install "fastapi>=0.115" ...``: the packages of ``extra``; those of ``fsdp`` for that extra alone.

    Example: install_line("sglang") == 'pip install "aiohttp>=3.10" "orjson>=3.9"'
    """
    try:
        rows = [row.partition(";") for row in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return f'pip install -e ".[{extra}]"   in a clone of slime'
    needed: dict[str, list[str]] = {}
    for name, _, marker in rows:
        needed.setdefault(marker.replace("'", '"').strip(), []).append(name.strip())
    names = needed.get(f'extra == "{extra}"', [])
    common = [] if extra == "fsdp" else needed.get('extra == "fsdp"', [])
    own = [f'"{name}"' for name in names if name not in common and not name.startswith(DISTRIBUTION)]
    return f"pip install {' '.join(own)}"
