"""What every section of a run's keys is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

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

    @field_validator(*SLIMES_OWN, mode="before", check_fields=False)
    @classmethod
    def leave_out_slimes_own(cls, value: Any, info: ValidationInfo) -> Any:
        """Empty where a value names slime's default (`SLIMES_OWN`)."""
        return "" if str(value).replace(":", ".") == SLIMES_OWN[info.field_name or ""] else value
