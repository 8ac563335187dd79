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
CONVERTED = {  # slime's other keys of a step; masks and rewards count, the rest repeats what samples say
    *("tokens", "loss_masks", "rewards", "raw_reward", "response_lengths", "total_lengths", "truncated"),
    *("sample_indices", "rollout_ids", "rollout_mask_sums", "round_number", "metadata", "source_names"),
    *("multimodal_train_inputs", "rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
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


def rollout_data(batch: Batch, rewards: NDArray[np.float64], samples: Sequence[Sample]) -> dict[str, Any]:
    """slime's dict of a step: lists with one entry a sample, tensors in float32."""
    import torch

    data: dict[str, Any] = {
        "tokens": [torch.from_numpy(part) for part in np.split(batch.tokens.astype(np.int64), batch.offsets[1:-1])],
        "total_lengths": batch.lengths.tolist(),
        "response_lengths": batch.response_lengths.tolist(),
        "loss_masks": per_sample(batch.loss_mask.copy(), batch),
        "rollout_mask_sums": rollout_mask_sums(batch).tolist(),
        "rewards": rewards.tolist(),
        "raw_reward": batch.reward.tolist(),
        "truncated": [int(sample.status is Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": batch.rollout.tolist(),
        "metadata": list(batch.train_metadata),
        "source_names": [get_source(sample) for sample in samples],
    }
    for key in COLUMNS:
        if (column := column_of(key, batch.columns)) in batch.columns:
            data[key] = per_sample(batch.columns[column].astype(np.float32), batch)
    return data


def per_sample(flat: NDArray[np.float32], batch: Batch) -> list[Any]:
    """A column of R entries as one tensor a sample, over the same memory."""
    import torch

    return list(torch.from_numpy(flat).split(batch.response_lengths.tolist()))


def get_source(sample: Sample) -> str:
    """Where a sample comes from: its own ``source``, its metadata's ``source_name``, or "unknown"."""
    return str(getattr(sample, "source", None) or (sample.metadata or {}).get("source_name") or "unknown")


def rollout_mask_sums(batch: Batch) -> NDArray[np.float64]:
    """Trainable tokens of each sample's rollout, [S]."""
    _, rollout_of = np.unique(batch.rollout, return_inverse=True)
    sums = np.bincount(rollout_of[batch.sample_of_token()], batch.loss_mask, len(batch))
    return np.asarray(sums[rollout_of], dtype=np.float64)


def column_of(key: str, columns: Mapping[str, Any]) -> str:
    """Our column of slime's key; a teacher's log-probs are the trainer's, else those that samples bring."""
    column = COLUMNS[key]
    return key if column == "teacher" and column not in columns else column


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


def check_keys(data: Mapping[str, Any]) -> None:
    """Refuse a converted step's keys that neither slime nor this module knows.

    Raises:
        ValueError: names them.
    """
    if unknown := sorted(set(data) - set(COLUMNS) - CONVERTED):
        keys = ", ".join(sorted(CONVERTED | set(COLUMNS)))
        raise ValueError(f"returned {', '.join(map(repr, unknown))}, which nothing reads; keys are {keys}")


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
    for key in COLUMNS:
        if data.get(key) is not None:
            batch.columns[column_of(key, batch.columns)] = flat_of(key, data[key], batch)


def numbers(name: str, items: Sequence[Any], batch: Batch) -> NDArray[np.float64]:
    """One number a sample.

    Raises:
        ValueError: another count.
    """
    values = np.asarray([float(value) for value in items], dtype=np.float64)
    if len(values) != len(batch):
        raise ValueError(f"'{name}' has {len(values)} entries for the step's {len(batch)} samples")
    return values
