"""A run's checkpoint as the source of a conversion: which one a path names, and the model folder it started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.checkpoint.manifest import MANIFEST, names_in
from slime_core.errors import ConfigError, StorageError
from slime_core.weights.folder import resolve

ANOTHER = "convert another checkpoint of the run: slime show RUN lists them"


def newest_step(path: Path) -> Path | None:
    """The newest `step-N` of a run directory, or of its `checkpoints`; None without one."""
    listings = (names_in(folder) for folder in (path, path / "checkpoints"))
    return next((step for named in listings for _, step in named if step.is_dir()), None)


def step_of(path: Path) -> Path:
    """The checkpoint of a `step-N`, of its `trainer`, of a run directory or of its `checkpoints` (the newest)."""
    return newest_step(path) or (path.parent if path.name == "trainer" else path)


def manifest_of(step: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where it says nothing.

    Raises:
        StorageError: STO112.
    """
    try:
        manifest: dict[str, Any] = json.loads((step / MANIFEST).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{MANIFEST} cannot be read", code="STO112", where=str(step), why=str(error), fix=ANOTHER
        ) from error
    return manifest


def origin_of(step: Path) -> Path:
    """The model folder that the run of a checkpoint started from.

    Raises:
        ConfigError: CFG05 it names none, or one that is not here. StorageError: as `manifest_of`.
    """
    named, cause = str(manifest_of(step).get("config", {}).get("rollout", {}).get("hf_checkpoint") or ""), None
    try:
        if named:
            return resolve(named)
    except ConfigError as error:
        cause = error
    raise ConfigError(
        f"the run's model folder {named!r} is not here" if named else "the checkpoint names no model folder",
        code="CFG05",
        where=str(step / MANIFEST if (step / MANIFEST).is_file() else step),
        why="config.json and the tokenizer come from it",
        fix="--origin-hf-dir FOLDER",
    ) from cause
