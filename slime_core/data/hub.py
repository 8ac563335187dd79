"""Rows of a data set of the Hugging Face hub, or of one saved on disk by `datasets`, by number.

    OWNER/NAME   OWNER/NAME#CONFIG   OWNER/NAME:SPLIT   OWNER/NAME#CONFIG:SPLIT        and FOLDER likewise

The split is `train` where none is named. `datasets` maps its Arrow files, so memory does not grow with them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from slime_core.config.paths import folder_of_set
from slime_core.data.parquet import without_nulls
from slime_core.data.rows import DataRows
from slime_core.errors import DataError, nearest

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(#(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
MOST_FILES = 10_000  # of a folder that is one set
SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves in a folder."""


class HubRows(DataRows):
    """The rows of one split.

    Example:
        rows = HubRows("openai/gsm8k#main:train")
        rows[0]["question"], rows.where(0)   # 'openai/gsm8k#main:train[0]'
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._rows = _load(spec)
        self._files = any(map(_is_media, self._rows.features.values()))
        if self._files:
            self._rows = self._rows.with_format("arrow")  # files as bytes, not decoded
        self.keys = tuple(self._rows.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = self._rows[row].to_pylist()[0] if self._files else self._rows[row]
        return {key: without_nulls(value) for key, value in values.items()}

    def where(self, row: int) -> str:
        """``name[row]``, counted from 0."""
        return f"{self.spec}[{row}]"

    def fingerprint(self) -> str:
        """The one that `datasets` keeps."""
        return f"datasets:{self._rows._fingerprint}:{len(self._rows)}"


def _is_media(feature: Any) -> bool:
    """Whether a feature of `datasets` is, or holds, pictures, videos or sounds."""
    if hasattr(feature, "decode_example"):
        return True
    if isinstance(feature, (dict, list)):
        return any(map(_is_media, feature.values() if isinstance(feature, dict) else feature))
    return hasattr(feature, "feature") and _is_media(feature.feature)


def is_hub_name(spec: str) -> bool:
    """Whether a text has the form of a hub name."""
    return NAME.fullmatch(spec) is not None


def _load(spec: str) -> Any:
    import datasets

    local = folder_of_set(spec)
    try:
        if local is not None:
            folder, config, split = local
            _refuse_crowded(folder, spec)
            saved = any((folder / name).is_file() for name in SAVED)
            dataset = datasets.load_from_disk(str(folder)) if saved else _of_files(folder, config)
        else:
            match = NAME.fullmatch(spec)
            assert match is not None, spec
            split = match["split"] or ""
            dataset = datasets.load_dataset(match["name"], match["config"])
    except DataError:
        raise
    except Exception as error:  # `datasets` raises many kinds, for a missing set as for a network that is not there
        raise DataError(
            f"the data set {spec} cannot be loaded",
            code="CFG05" if local is None else "DAT30",
            where=f"data.prompt_data = {spec} (working folder {Path.cwd()})",
            why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="name one of its files"
            if local is not None
            else "name a file or folder, or fetch it where there is a network: hf download --repo-type dataset NAME",
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    name = split or ("train" if "train" in dataset or len(dataset) != 1 else next(iter(dataset)))
    if name not in dataset:
        raise DataError(
            f"{spec} has no split {name!r}, it has {', '.join(dataset)}",
            code="DAT18",
            where=f"data.prompt_data = {spec}",
            fix=nearest(name, tuple(dataset))
            or f"name one: {spec.removesuffix(':' + name)}:{next(iter(dataset), 'SPLIT')}",
        )
    return dataset[name]


def _refuse_crowded(folder: Path, spec: str) -> None:
    """DAT30 for a folder that holds no one set: `datasets` would look at each file for minutes, and hear no signal."""
    count = 0
    for _, _, names in os.walk(folder):
        count += len(names)
        if count > MOST_FILES:
            raise DataError(
                f"{folder} holds more than {MOST_FILES} files",
                code="DAT30",
                where=f"data.prompt_data = {spec} (working folder {Path.cwd()})",
                why="a folder is one data set, with all files below it",
                fix="name the set's own folder, or one of its files",
            )


def _of_files(folder: Path, config: str) -> Any:
    """A folder of files in the hub's form, whose README may name configurations.

    Raises:
        DataError: DAT18 it has several configurations, and none of this name.
    """
    import datasets

    configurations = datasets.get_dataset_config_names(str(folder))
    if config not in configurations and (config or (len(configurations) > 1 and "default" not in configurations)):
        raise DataError(
            f"{folder} has no configuration {config!r}" if config else f"{folder} has several configurations",
            code="DAT18",
            where=f"data.prompt_data = {folder}" + (f"#{config}" if config else ""),
            why=f"it has {', '.join(configurations)}",
            fix=nearest(config, configurations) or f"name one: {folder}#{configurations[0]}",
        )
    return datasets.load_dataset(str(folder), config or None)
