"""Adapter folders for an engine that computes with adapters beside the base, without a trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slime_core.lora.folder import CONFIG, PREFIX, WEIGHTS, BaseForm, read_base_form, read_spec
from slime_core.lora.spec import DEFAULT
from slime_core.types import AdapterUpdate
from slime_core.weights.shards import Shards, read_header


def served_adapters(path: Path, names: Sequence[str]) -> dict[str, AdapterUpdate]:
    """The adapter of a folder, under each of ``names``, or those of ``names``, which have a folder there each.

    Raises:
        ConfigError: CFG05 no such folder.
        DataError: TOK00, TOK46 a folder that is not one of an adapter, or of a kind that is not computed here.
    """
    return {name: _update(folder) for name, folder in _folders(path, names).items()}


def base_form(path: Path, names: Sequence[str]) -> BaseForm:
    """What the adapters were trained on, arguments as of :func:`served_adapters`; the same of all.

    Raises:
        DataError: TOK46, TOK47 an adapter folder without weights, or with damaged ones.
    """
    return read_base_form(next(iter(_folders(path, names).values())))


def _folders(path: Path, names: Sequence[str]) -> dict[str, Path]:
    one = (path / CONFIG).is_file()
    return {name: path if one else path / name for name in names or (DEFAULT,)}


def base_of(path: Path) -> str:
    """The base model that an adapter folder names, or the first of several folders in one.

    Raises:
        ConfigError, DataError: as :func:`served_adapters`.
    """
    folder = path if (path / CONFIG).is_file() else min(path.glob(f"*/{CONFIG}"), default=path / CONFIG).parent
    read_spec(folder, "MODEL")
    return str(json.loads((folder / CONFIG).read_bytes())["base_model_name_or_path"])


def _update(folder: Path) -> AdapterUpdate:
    read_spec(folder, "MODEL")
    tensors = Shards(read_header(folder / WEIGHTS))
    return AdapterUpdate(
        config=json.loads((folder / CONFIG).read_bytes()),
        tensors={name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
    )
