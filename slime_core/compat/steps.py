"""A step's flat columns as slime's lists of per-sample tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.compat.sample import Sample
from slime_core.types import Batch, Status

COLUMNS = {  # slime's key -> our column
    "log_probs": "policy",
    "ref_log_probs": "reference",
    "teacher_log_probs": "teacher",
    "values": "values",
    "rollout_log_probs": "rollout_log_probs",
    "advantages": "advantages",
    "returns": "returns",
}


def samples_of(batch: Batch, samples_by_id: Mapping[str, Sample]) -> list[Sample]:
    """The step's samples, in batch order: those that are still alive, others rebuilt from the columns."""
    return [samples_by_id.get(name) or _rebuilt(batch, index) for index, name in enumerate(batch.sample_ids)]


def _rebuilt(batch: Batch, index: int) -> Sample:
    tokens = slice(batch.offsets[index], batch.offsets[index + 1])
    response = slice(batch.response_offsets[index], batch.response_offsets[index + 1])
    log_probs = batch.columns.get("rollout_log_probs")
    return Sample(
        id=batch.sample_ids[index],
        task=batch.tasks[index],
        tokens=batch.tokens[tokens].tolist(),
        response_length=int(response.stop - response.start),
        loss_mask=batch.loss_mask[response].astype(int).tolist(),
        rollout_log_probs=log_probs[response].tolist() if log_probs is not None else None,
        reward=float(batch.reward[index]),
        group_index=int(batch.group[index]),
        index=index,
        rollout_id=int(batch.rollout[index]),
        status=Status.COMPLETED,
        train_metadata=dict(batch.train_metadata[index]) if batch.train_metadata else {},
    )


def rollout_data(batch: Batch, rewards: NDArray[np.float64]) -> dict[str, Any]:
    """slime's dict of a step: lists with one entry a sample, tensors in float32."""
    import torch

    def parts(flat: NDArray[Any], offsets: NDArray[np.int64]) -> list[Any]:
        return [torch.from_numpy(part.copy()) for part in np.split(flat, offsets[1:-1])]

    data: dict[str, Any] = {
        "tokens": parts(batch.tokens.astype(np.int64), batch.offsets),
        "total_lengths": batch.lengths.tolist(),
        "response_lengths": batch.response_lengths.tolist(),
        "loss_masks": parts(batch.loss_mask, batch.response_offsets),
        "rewards": rewards.tolist(),
        "raw_reward": batch.reward.tolist(),
        "sample_indices": list(range(len(batch))),
        "rollout_ids": batch.rollout.tolist(),
        "metadata": list(batch.train_metadata),
    }
    for key, column in COLUMNS.items():
        if column in batch.columns:
            data[key] = parts(batch.columns[column].astype(np.float32), batch.response_offsets)
    return data


def flat_of(name: str, value: Any, batch: Batch) -> NDArray[np.float32]:
    """A list of per-sample values as one column of R entries.

    Raises:
        ValueError: another number of samples, or of tokens of one.
    """
    if not isinstance(value, (list, tuple)) or len(value) != len(batch):
        raise ValueError(f"'{name}' needs a list with one entry for each of the step's {len(batch)} samples")
    rows = [np.asarray(row, dtype=np.float32).reshape(-1) for row in map(_detached, value)]
    for row, length, sample in zip(rows, batch.response_lengths, batch.sample_ids, strict=True):
        if len(row) != length:
            raise ValueError(
                f"'{name}' has {len(row)} entries for sample {sample}, which has {length} response tokens"
            )
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32)


def _detached(row: Any) -> Any:
    return row.detach().cpu().numpy() if hasattr(row, "detach") else row


def write_back(data: Mapping[str, Any], batch: Batch) -> None:
    """Take what a function may change into the batch: masks and every column; tokens may not differ.

    Raises:
        ValueError: other tokens, samples or lengths.
    """
    if "tokens" in data:
        tokens = [np.asarray(_detached(row)).reshape(-1) for row in data["tokens"]]
        if len(tokens) != len(batch) or not np.array_equal(np.concatenate(tokens), batch.tokens):
            raise ValueError("'tokens' changed; a step trains on the tokens that were sampled")
    if "loss_masks" in data:
        batch.loss_mask[:] = flat_of("loss_masks", data["loss_masks"], batch)
    for key, column in COLUMNS.items():
        if key in data and data[key] is not None and (column in batch.columns or key in ("advantages", "returns")):
            batch.columns[column] = flat_of(key, data[key], batch)


def numbers(name: str, items: Sequence[Any], batch: Batch) -> NDArray[np.float64]:
    """One number a sample.

    Raises:
        ValueError: another count.
    """
    values = np.asarray([float(value) for value in items], dtype=np.float64)
    if len(values) != len(batch):
        raise ValueError(f"'{name}' has {len(values)} entries for the step's {len(batch)} samples")
    return values
