"""A step's Batch of finished groups: the second border, where nothing unfit passes on to training.

Everything is checked with the sample's id: lengths, token range, finite log-probs and rewards, masks, rollout tables;
then what scores and losses add to it. A sample marked ``remove_sample`` keeps its place in its group's statistics and
gets mask 0.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import TrainerError
from slime_core.trainers.media import media_keys
from slime_core.trainers.packing import split_rollouts
from slime_core.types import Batch, Columns, Group, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Loss

INT32_MAX = 2**31 - 1
PER_TOKEN = ("rollout_log_probs", "teacher_log_probs", "advantages", "returns")


def make_batch(version: int, stage: str, groups: Sequence[Group]) -> Batch:
    """The groups' samples as one Batch, in order, with a rollout id that is unique in the step.

    Columns: ``rollout_log_probs``, and ``teacher_log_probs``, ``advantages`` and ``returns`` where every sample
    brings them.

    Raises:
        TrainerError: TRN102 lengths or a rollout table that do not fit, TRN95 a number that is not finite,
            TRN00 a token that no int32 holds, or a mask other than 0 and 1; each names the sample.
    """
    samples: list[Sample] = []
    group_ids: list[int] = []
    rollout_ids: list[int] = []
    positions = [group.prompt.position for group in groups]
    distinct = len(set(positions)) == len(positions)
    rollouts = 0
    for number, group in enumerate(groups):
        rollout_of = _rollout_table(group)
        names = {name: rollouts + k for k, name in enumerate(dict.fromkeys(rollout_of))}
        rollouts += len(names)
        rollout_ids += [names[name] for name in rollout_of]
        group_ids += [positions[number] if distinct else number] * len(group.samples)
        samples += group.samples
    for sample in samples:
        _check(sample)
    return _columns(version, stage, samples, group_ids, rollout_ids)


def _columns(version: int, stage: str, samples: list[Sample], groups: list[int], rollouts: list[int]) -> Batch:
    multimodal = [sample.multimodal_train_inputs for sample in samples]
    experts = [sample.rollout_routed_experts for sample in samples]
    return Batch(
        version=version,
        stage=stage,
        sample_ids=[sample.id for sample in samples],
        tasks=[sample.task for sample in samples],
        roles=[sample.role for sample in samples],
        models=[sample.model for sample in samples] if any(sample.model for sample in samples) else [],
        group=np.array(groups, dtype=np.int64),
        rollout=np.array(rollouts, dtype=np.int64),
        reward=np.array([float(sample.reward) for sample in samples], dtype=np.float64),  # type: ignore[arg-type]
        tokens=_tokens(samples),
        offsets=_offsets([len(sample.tokens) for sample in samples]),
        loss_mask=_masks(samples),
        response_offsets=_offsets([sample.response_length for sample in samples]),
        columns=_per_token(samples),
        temperature=np.array([sample.temperature for sample in samples], dtype=np.float32),
        multimodal=multimodal if any(item is not None for item in multimodal) else None,
        routed_experts=experts if any(item is not None for item in experts) else None,
        train_metadata=[sample.train_metadata for sample in samples],
    )


def _flat(rows: Sequence[Sequence[Any]], dtype: Any) -> Any:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype, count=sum(map(len, rows)))


def _tokens(samples: Sequence[Sample]) -> Any:
    """All token ids, int32.

    Raises:
        TrainerError: TRN00 one that no int32 holds.
    """
    try:
        tokens = _flat([sample.tokens for sample in samples], np.int64)
        fit = not len(tokens) or (tokens.min() >= 0 and tokens.max() <= INT32_MAX)
    except OverflowError:
        fit = False
    if not fit:
        sample, token = next((s, t) for s in samples for t in s.tokens if not 0 <= t <= INT32_MAX)
        raise _wrong(f"sample {sample.id} holds token id {token}", f"sample {sample.id}")
    return tokens.astype(np.int32)


def _masks(samples: Sequence[Sample]) -> Any:
    """All masks, float32; most are 1 throughout."""
    ends = _offsets([sample.response_length for sample in samples])
    masks = np.ones(int(ends[-1]), dtype=np.float32)
    for sample, start, stop in zip(samples, ends[:-1].tolist(), ends[1:].tolist()):
        if sample.remove_sample:
            masks[start:stop] = 0
        elif sample.loss_mask is not None and 0 in sample.loss_mask:
            masks[start:stop] = sample.loss_mask
    return masks


def _offsets(lengths: Sequence[int]) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _per_token(samples: Sequence[Sample]) -> Columns:
    columns: Columns = {}
    with_response = [sample for sample in samples if sample.response_length]
    for name in PER_TOKEN:
        rows = [getattr(sample, name) for sample in with_response]
        if name == "rollout_log_probs":
            rows = [row if row is not None else [0.0] * s.response_length for row, s in zip(rows, with_response)]
        if rows and all(row is not None for row in rows):
            columns[name] = _flat(rows, np.float32)
    return columns


def _rollout_table(group: Group) -> list[int]:
    """The rollout of each sample of a group."""
    members = sorted(index for indices in group.rollouts.values() for index in indices)
    if members != list(range(len(group.samples))):
        raise _wrong(
            f"the rollouts of group {group.id} name samples {members}, the group has {len(group.samples)}",
            f"group {group.id}",
            code="TRN102",
            fix="every sample belongs to exactly one rollout of Group.rollouts",
        )
    table = {index: rollout for rollout, indices in group.rollouts.items() for index in indices}
    return [table[index] for index in range(len(group.samples))]


def _check(sample: Sample) -> None:
    where, count = f"sample {sample.id}", sample.response_length
    if not 0 <= count <= len(sample.tokens) or not sample.tokens:
        raise _wrong(f"{where} has {len(sample.tokens)} tokens and response_length {count}", where, code="TRN102")
    if count == len(sample.tokens):
        raise _wrong(
            f"{where} has no prompt token, so nothing predicts its first response token",
            where,
            code="TRN102",
            fix="give every prompt at least one token (a begin token, for example)",
        )
    for name in ("loss_mask", *PER_TOKEN):
        values = getattr(sample, name)
        if values is not None and len(values) != count:
            raise _wrong(
                f"{where} has {len(values)} entries of {name} and {count} response tokens",
                where,
                code="TRN102",
                fix="add turns with sample.append_response(tokens, log_probs, mask)",
            )
    _check_numbers(sample, where)


def _check_numbers(sample: Sample, where: str) -> None:
    reward = sample.reward
    if isinstance(reward, bool) or not isinstance(reward, (int, float, np.number)):
        raise _wrong(
            f"{where} has reward {reward!r}, which is not a number",
            where,
            fix="return a number from the reward, or name its entry with reward.reward_key",
        )
    if not math.isfinite(reward):
        raise _wrong(f"{where} has reward {reward}", where, code="TRN95", why="nothing is replaced by 0 silently")
    for name in PER_TOKEN:
        values = getattr(sample, name)
        if values and not math.isfinite(sum(values)):  # one that is not finite stays so in the sum
            bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
            if bad is not None:
                raise _wrong(f"{where} has {name} {values[bad]} at response token {bad}", where, code="TRN95")
    if sample.loss_mask and sample.loss_mask.count(0) + sample.loss_mask.count(1) != len(sample.loss_mask):
        raise _wrong(f"{where} has a loss_mask entry other than 0 and 1", where)
    trainable = not sample.remove_sample and (sample.loss_mask is None or any(sample.loss_mask))
    if sample.response_length and trainable and sample.rollout_log_probs is None:
        raise _wrong(
            f"{where} has trainable tokens and no rollout_log_probs",
            where,
            code="TRN102",
            fix="add turns with sample.append_response(tokens, log_probs), or mask what no model made",
        )


def _wrong(what: str, where: str, *, code: str = "TRN00", why: str = "", fix: str = "") -> TrainerError:
    return TrainerError(what, code=code, where=where, why=why, fix=fix)


def check_shape(batch: Batch) -> None:
    """Refuse what cannot be divided.

    Raises:
        TrainerError: TRN00 an empty batch, TRN102 a column of another length.
    """
    if len(batch) == 0:
        raise TrainerError("the batch is empty", where=f"step {batch.version}")
    for name, values in batch.columns.items():
        if values.shape[:1] != batch.loss_mask.shape:
            raise TrainerError(
                f"column {name} has shape {values.shape}, the batch {batch.loss_mask.shape} response tokens",
                code="TRN102",
            )


def check_columns(batch: Batch, names: Sequence[str], reader: str, more: str = "") -> None:
    """Refuse a batch without the columns that ``reader`` reads; ``more`` ends the reason.

    Raises:
        TrainerError: a column is missing.
    """
    if missing := [name for name in names if name not in batch.columns]:
        raise _wrong(
            f"the batch has no column {missing[0]}, which {reader}", "", why=f"it has {sorted(batch.columns)}{more}"
        )


def check_tokens(batch: Batch, vocab_size: int, *, whose: str = "", code: str = "TOK44", where: str = "") -> None:
    """Refuse tokens that a model, the policy or ``whose``, has no row for.

    Raises:
        TrainerError: ``code`` with the sample.
    """
    place = int(batch.tokens.argmax())
    if int(batch.tokens[place]) < vocab_size:
        return
    sample = batch.sample_ids[int(np.searchsorted(batch.offsets, place, side="right")) - 1]
    raise _wrong(
        f"sample {sample} holds token id {int(batch.tokens[place])}, outside the {whose}vocabulary of {vocab_size}",
        where or f"sample {sample}",
        code=code,
    )


def check_finite(batch: Batch, values: NDArray[np.float32], what: str, *, why: str, fix: str = "") -> None:
    """Refuse ``what`` a model gave for response tokens, [R], where it is not finite.

    Raises:
        TrainerError: TRN95 with the sample.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        sample = batch.sample_ids[int(np.searchsorted(batch.response_offsets, bad[0], side="right")) - 1]
        where = f"sample {sample}"
        raise _wrong(f"a {what} of {where} is {values[bad[0]]}", where, code="TRN95", why=why, fix=fix)


def stamp_of(batch: Batch) -> int:
    """A checksum (crc32) of what all ranks must have alike."""
    stamp = zlib.crc32(json.dumps([batch.version, batch.stage, batch.sample_ids, sorted(batch.columns)]).encode())
    temperature = batch.temperature if batch.temperature is not None else np.zeros(0, np.float32)
    arrays = [batch.tokens, batch.offsets, batch.response_offsets, batch.loss_mask, batch.rollout, temperature]
    for values in [*arrays, *(batch.columns[name] for name in sorted(batch.columns))]:
        stamp = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, stamp)
    return zlib.crc32(repr(media_keys(batch)).encode(), stamp) if batch.multimodal is not None else stamp


def prepared(batch: Batch, loss: Loss, train: Any) -> Batch:
    """The batch with what ``loss.prepare`` answers for each optimizer step; without ``prepare`` the batch itself.

    ``prepare(columns, train)`` gets the step's rows of every column, ``loss_mask`` and ``sample`` (the batch's index
    of each token's sample), and answers one array a new column, with one finite number a row.

    Raises:
        TrainerError: TRN102 another type, length or set of names, or a column that is there already; TRN95 a number
            that is not finite.
    """
    if loss.prepare is None:
        return batch
    of_token = batch.sample_of_token()
    columns: Columns = {}
    columns_given = {**batch.columns, "loss_mask": batch.loss_mask, "sample": of_token}
    where = f"step {batch.version}, loss '{loss.name}'"
    for number, rollouts in enumerate(split_rollouts(batch, train.num_steps_per_rollout, train.global_batch_size)):
        rows = np.isin(batch.rollout, rollouts)[of_token]
        answer = loss.prepare({name: values[rows] for name, values in columns_given.items()}, train)
        checked = _checked_columns(answer, int(rows.sum()), columns_given, where)
        if number and set(checked) != set(columns):
            raise _misprepared(
                f"prepare made {sorted(checked)} for one optimizer step and {sorted(columns)} before", where
            )
        for name, values in checked.items():
            columns.setdefault(name, np.zeros((len(of_token), *values.shape[1:]), values.dtype))[rows] = values
    return replace(batch, columns={**batch.columns, **columns})


def _checked_columns(answer: Any, rows: int, inputs: Columns, where: str) -> Columns:
    if not isinstance(answer, dict):
        raise _misprepared(f"prepare answered a {type(answer).__name__}, not a dict of columns", where)
    columns: Columns = {}
    for name, values in answer.items():
        array: NDArray[Any] = np.asarray(values)
        if name in inputs:
            raise _misprepared(f"prepare made the column {name}, which the batch has already", where)
        if array.shape[:1] != (rows,):
            raise _misprepared(f"prepare made column {name} of shape {array.shape} for {rows} tokens", where)
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise TrainerError(
                f"prepare made column {name} with a value that is not a finite number", code="TRN95", where=where
            )
        columns[name] = array
    return columns


def _misprepared(what: str, where: str) -> TrainerError:
    return TrainerError(what, code="TRN102", where=where, fix="answer a dict: name to one number a token of the step")
