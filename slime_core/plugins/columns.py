"""Scores by role and an estimator's answer in, checked columns of the batch out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.plugins.boundary import wrong
from slime_core.plugins.provider import Answer
from slime_core.types import Batch, Columns

MAY_GIVE = ("advantages", "returns")


def role_columns(scores: Mapping[str, Columns]) -> Columns:
    """One column a role, as estimators and losses read it: its log-probs or values; also ``policy_entropy``.

    Example: {"policy": {"log_probs": lp, "entropy": h}} gives {"policy": lp, "policy_entropy": h}
    """
    found: Columns = {}
    for role, columns in scores.items():
        for name, values in columns.items():
            found[role if name in ("log_probs", "values") else f"{role}_{name}"] = values
    return found


def checked_columns(answer: Answer, found: Any, batch: Batch) -> Columns:
    """``advantages`` and perhaps ``returns`` as float32 of R entries.

    Raises:
        PluginError: PLG57 no ``advantages`` or not numbers, PLG58 not finite (named by sample), PLG59 another length.
    """
    about = f"step {batch.version}"
    if not isinstance(found, Mapping) or "advantages" not in found:
        have = list(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise wrong(answer, f"returned {have}", about, code="PLG57", fix='return {"advantages": an array of R floats}')
    columns: Columns = {}
    for name, values in found.items():
        column = np.asarray(values) if not isinstance(values, (str, bytes)) else np.asarray(None)
        if name not in MAY_GIVE or column.dtype.kind not in "fiub":
            raise wrong(
                answer,
                f"returned '{name}' of type {column.dtype}",
                about,
                code="PLG57",
                why=f"an estimator gives {' and '.join(MAY_GIVE)}, arrays of numbers",
            )
        if column.shape != batch.loss_mask.shape:
            raise wrong(
                answer,
                f"returned '{name}' of shape {column.shape}, not {batch.loss_mask.shape},",
                about,
                code="PLG59",
                why="one value a response token of the whole step",
                fix="per_sample[batch.sample_of_token()] spreads values of samples over tokens",
            )
        columns[name] = _finite(answer, name, column.astype(np.float32), batch)
    return columns


def _finite(answer: Answer, name: str, column: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        sample = int(np.searchsorted(batch.response_offsets, bad[0], side="right")) - 1
        raise wrong(
            answer,
            f"returned '{name}' with {column[bad[0]]} at response token {bad[0] - batch.response_offsets[sample]} "
            f"of sample '{batch.sample_ids[sample]}' ({bad.size} such values)",
            f"step {batch.version}",
            code="PLG58",
            why="nothing is replaced by 0 silently",
        )
    return column
