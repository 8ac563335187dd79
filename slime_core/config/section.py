"""What every section of a run's keys is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

SLIMES_OWN = {
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "eval_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "buffer_filter_path": "slime.rollout.data_source.pop_first",
}
"""What THUDM/slime has under these keys where nobody sets them: the core's own way, so the keys stay empty."""


class Section(BaseModel):
    """A frozen section: unknown keys and wrong types are errors, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def leave_out_slimes_own(cls, data: Any) -> Any:
        """Drop values that name slime's defaults (`SLIMES_OWN`)."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if SLIMES_OWN.get(key, ()) != str(value).replace(":", ".")}
