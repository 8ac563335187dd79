"""What fp8 in rollouts settles in a config: whether ``auto`` means it, and a correction of the loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_core.config.schema import Config
from slime_core.plugins.backends import engine_of

CORRECTIONS = ("use_tis", "use_rs", "rs_veto_threshold", "use_rollout_logprobs", "custom_tis_function_path")
"""Keys of [train] that say what becomes of the gap between engine and trainer."""


def settled(config: Config, tables: Mapping[str, Any]) -> Config:
    """The config with ``rollout_quantization`` = fp8 where ``auto`` means it, and then with ``use_tis``.

    Args:
        tables: what was written of it; ``use_tis`` stays as it is where they name a correction, on or off.
            So it does where there are no rollouts.
    """
    rollout = config.rollout
    if rollout.rollout_quantization == "auto" and _is_fp8(rollout.hf_checkpoint) and not engine_of(config).embedded:
        rollout = rollout.model_copy(update={"rollout_quantization": "fp8"})
    if rollout.rollout_quantization != "fp8":
        return config
    as_is = any(name in CORRECTIONS for name in _train_keys(tables)) or (config.train.offline and not config.stage)
    train = config.train if as_is else config.train.model_copy(update={"use_tis": True})
    return config.model_copy(update={"rollout": rollout, "train": train})


def _train_keys(tables: Mapping[str, Any]) -> Iterator[str]:
    """The keys of [train] in the tables of the run and of its stages."""
    yield from tables.get("train", {})
    for stage in tables.get("stage", ()):
        yield from stage
        yield from stage.get("train", {})


def _is_fp8(model: str) -> bool:
    """Whether config.json of a local folder says so; of a hub name it is not known yet."""
    try:
        table = json.loads((Path(model).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    stored = table.get("quantization_config") if isinstance(table, dict) else None
    return isinstance(stored, dict) and stored.get("quant_method") == "fp8" and "weight_block_size" in stored
