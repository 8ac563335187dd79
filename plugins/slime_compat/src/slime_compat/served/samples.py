"""`slime.utils.types`."""

from __future__ import annotations

from typing import Any

from slime_core.compat.sample import Sample

RolloutBatch = dict[str, Any]

__all__ = ["RolloutBatch", "Sample"]
