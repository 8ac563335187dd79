"""Models that see pictures: which configs are such models', and the files of a folder that say how they see."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from slime_core.durable import storage_error
from slime_core.media.positions import FAMILIES

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def sees(config: Any) -> bool:
    """Whether a config is that of a model of pictures and text of a family that is known.

    Args:
        config: in transformers' form
    """
    return config.model_type in FAMILIES


def carry_processor(origin: Path, folder: Path) -> None:
    """Copy the files of a processor, byte for byte, where ``origin`` has some.

    Raises:
        StorageError: they cannot be written.
    """
    try:
        for name in PROCESSOR_FILES:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
    except OSError as error:
        raise storage_error(error, folder, "the processor's files cannot be written") from error
