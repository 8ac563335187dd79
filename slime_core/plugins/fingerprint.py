"""What a run's plugins are, as one checksum: workers that rebuilt them from names compare it before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime_core.hookspecs import API_VERSION
from slime_core.plugins.load import Loaded


def fingerprint(loaded: Mapping[str, Loaded], routing: list[dict[str, str]], files: Iterable[Path]) -> str:
    """A checksum of names, versions, hooks, routing, and the bytes of every source file of plugins and functions."""
    sources = hashlib.blake2b(digest_size=16)
    for file in (*_package_files(loaded), *sorted(files)):
        sources.update(file.name.encode() + b"\0" + file.read_bytes())
    facts = {
        "api": API_VERSION,
        "plugins": [[name, plugin.provider.origin, sorted(plugin.answers)] for name, plugin in loaded.items()],
        "routing": routing,
        "sources": sources.hexdigest(),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def sources(loaded: Mapping[str, Loaded], files: Iterable[Path]) -> dict[str, str]:
    """A checksum of each plugin's source files by ``plugin NAME``, and of each file of functions by its path."""
    found = {}
    for name, plugin in loaded.items():
        digest = hashlib.blake2b(digest_size=8)
        for file in _package_files({name: plugin}):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        found[f"plugin {name}"] = digest.hexdigest()
    for file in sorted(files):
        found[str(file)] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return found


def _package_files(loaded: Mapping[str, Loaded]) -> list[Path]:
    found: list[Path] = []
    for home in (plugin.provider.home for plugin in loaded.values()):
        if home is not None:
            found += sorted(home.rglob("*.py")) if home.is_dir() else [home]
    return found
