"""What is refused before a pass: unfit batches, batches that differ between ranks, models of other vocabularies.

Every check raises a TrainerError that names the sample, the ranks or the two models; none changes anything.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.errors import SlimeError, TrainerError
from slime_core.weights.folder import ModelFolder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Loss
    from slime_core.types import Batch

SHOWN = 8  # sample ids in a message
Shapes = Mapping[str, tuple[int, ...]]


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


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Refuse tokens that the policy has no row for.

    Raises:
        TrainerError: TOK44 with the sample.
    """
    if sample := beyond(batch, vocab_size):
        raise TrainerError(
            f"sample {sample} holds token id {int(batch.tokens.max())}, outside the vocabulary of {vocab_size}",
            code="TOK44",
            where=f"sample {sample}",
        )


def beyond(batch: Batch, vocab_size: int) -> str:
    """The sample that holds the highest token id, where that id is outside a vocabulary; else an empty string."""
    place = int(batch.tokens.argmax())
    if int(batch.tokens[place]) < vocab_size:
        return ""
    return batch.sample_ids[int(np.searchsorted(batch.offsets, place, side="right")) - 1]


def sample_at(batch: Batch, row: int) -> str:
    """The id of the sample that owns a response token."""
    return batch.sample_ids[int(np.searchsorted(batch.response_offsets, row, side="right")) - 1]


def check_log_probs(batch: Batch, log_probs: NDArray[np.float32]) -> None:
    """Refuse a model whose log-prob of a response token, [R], is not finite.

    Raises:
        TrainerError: TRN95 with the sample.
    """
    bad = np.flatnonzero(~np.isfinite(log_probs))
    if bad.size:
        sample = sample_at(batch, int(bad[0]))
        raise TrainerError(
            f"a log-prob of sample {sample} is {log_probs[bad[0]]}",
            code="TRN95",
            where=f"sample {sample}",
            why="the weights or a logit are not finite",
        )


def check_columns(batch: Batch, loss: Loss) -> None:
    """Refuse a batch that a loss cannot read.

    Raises:
        TrainerError: a column is missing.
    """
    if missing := [name for name in loss.columns if name not in batch.columns]:
        raise TrainerError(
            f"the batch has no column {missing[0]}, which the loss '{loss.name}' reads",
            why=f"it has {sorted(batch.columns)}",
        )


def stamp_of(batch: Batch) -> int:
    """A checksum (crc32) of what all ranks must have alike."""
    stamp = zlib.crc32(json.dumps([batch.version, batch.stage, batch.sample_ids, sorted(batch.columns)]).encode())
    temperature = batch.temperature if batch.temperature is not None else np.zeros(0, np.float32)
    arrays = [batch.tokens, batch.offsets, batch.response_offsets, batch.loss_mask, batch.rollout, temperature]
    for values in [*arrays, *(batch.columns[name] for name in sorted(batch.columns))]:
        stamp = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, stamp)
    return stamp


def agreed(check: Callable[[], None], stamp: int, version: int, rank: int, world: int) -> None:
    """Make a check of what this rank was given; where it fails on one rank, it fails on all; a collective.

    Raises:
        SlimeError: the check's, of the first rank that has one.
        TrainerError: TRN106 ranks whose stamps differ from those of most, with their numbers.
    """
    error: SlimeError | None = None
    try:
        check()
    except SlimeError as found:
        error = found
    if world == 1:
        if error is not None:
            raise error
        return
    mine = torch.tensor([stamp, error is not None], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine)
    stamps, failed = zip(*(row.tolist() for row in rows))
    if any(failed):
        errors: list[SlimeError | None] = [None] * world
        dist.all_gather_object(errors, error)
        raise next(one for one in errors if one is not None)
    usual = max(stamps, key=lambda one: (stamps.count(one), -stamps.index(one)))
    if odd := [number for number, one in enumerate(stamps) if one != usual]:
        raise TrainerError(
            f"ranks {odd} of {world} were given another batch than the others",
            code="TRN106",
            where=f"step {version}, rank {rank}",
            fix="a function given by path (slime_batch, an advantage) must not depend on the process it runs in",
        )


def open_model(key: str, path: str, policy: ModelFolder, *, weights: bool = True) -> ModelFolder:
    """The model folder that a config key names, whose token ids mean what the policy's do.

    Args:
        key: such as ``train.teacher_load``
        weights: False leaves the weights unread and unchecked, for checkpoints of another kind of model

    Raises:
        TrainerError: TRN104 another vocabulary; both folders are named.
        SlimeError: what `ModelFolder.open` raises, with the key.
    """
    try:
        other = ModelFolder.open(
            path, trust_remote_code=policy.trust_remote_code, init_weights="load" if weights else "random"
        )
    except SlimeError as error:
        error.where = f"{key} = {path}: {error.where}"
        raise
    same_vocabulary(policy, other, key)
    return other


def same_vocabulary(policy: ModelFolder, other: ModelFolder, key: str) -> None:
    """Refuse a model that reads the policy's token ids as other tokens, or has no row for one.

    Raises:
        TrainerError: TRN104.
    """
    mine, theirs = policy.tokenizer().get_vocab(), other.tokenizer().get_vocab()
    wrong = sorted((i, token) for token, i in mine.items() if theirs.get(token) != i)
    top = max(mine.values(), default=-1)
    if not wrong and top < other.vocab_size:
        return
    why = f"its embedding has {other.vocab_size} rows, token ids reach {top}"
    if wrong:
        i, token = wrong[0]
        there = theirs.get(token)
        what = f"id {there}" if there is not None else "no token"
        why = f"{len(wrong)} of {len(mine)} tokens differ: {token!r} is id {i} for the policy and {what} there"
    raise TrainerError(
        f"the model of {key} has another vocabulary than the policy",
        code="TRN104",
        where=f"{key} = {other.path}, rollout.hf_checkpoint = {policy.path}",
        why=why,
        fix=f"name a model with the policy's tokenizer in {key}",
    )


def not_finite(version: int, ids: Sequence[str], bad: list[int], loss: float, norm: float) -> TrainerError:
    """TRN95 for a loss or a gradient, with the samples where they are known: ``bad`` are places in ``ids``."""
    shown = ids_of(ids, bad)
    what = f"the loss of samples {shown} is not finite" if bad else f"the gradient norm is {norm}, the loss {loss}"
    return TrainerError(
        what,
        code="TRN95",
        where=f"step {version}" + (f", samples {shown}" if bad else f", {len(ids)} samples"),
        why="no weight was changed by this optimizer step",
        fix="lower train.lr, or set train.clip_grad=1.0",
    )


def ids_of(names: Sequence[str], samples: list[int], most: int = SHOWN) -> str:
    """Ids of samples for a message, the first few of them."""
    ids = [names[i] for i in samples]
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


WHY = {
    "reference": "a reference is kept where train.kl_loss_coef or train.kl_coef is above 0",
    "teacher": "train.teacher_load names a teacher, and train.teacher_place = trainer keeps it here",
    "values": "a critic is kept where the estimator reads values: train.advantage_estimator = ppo",
}


def missing(role: str) -> TrainerError:
    """A role was asked for that the stage does not hold."""
    return TrainerError(f"this trainer holds no {role} model", why=WHY.get(role, ""))


def teacher_of(train: Any) -> str:
    """The folder of the teacher that a stage needs.

    Raises:
        TrainerError: none is named.
    """
    if not train.teacher_load:
        raise TrainerError(
            "a teacher is needed and none is named",
            where="train.teacher_load",
            fix="name the teacher's model folder: --teacher-load DIR",
        )
    return str(train.teacher_load)


def known_to_teacher(batch: Batch, vocab_size: int, path: str, policy: ModelFolder) -> None:
    """Refuse tokens that the teacher has no row for (padding of the policy's embedding).

    Raises:
        TrainerError: TRN104 with the sample.
    """
    if sample := beyond(batch, vocab_size):
        raise TrainerError(
            f"sample {sample} holds token id {int(batch.tokens.max())}, outside the teacher's "
            f"vocabulary of {vocab_size}",
            code="TRN104",
            where=f"train.teacher_load = {path}, rollout.hf_checkpoint = {policy.path}",
        )


def same_tensors(key: str, other: ModelFolder, mine: Shapes, theirs: Shapes, policy: ModelFolder) -> None:
    """Refuse a reference of another architecture: the policy computes with its weights.

    Args:
        mine, theirs: shapes of the policy's tensors and the reference's by name

    Raises:
        TrainerError: TRN104.
    """
    wrong = [n for n in {*mine, *theirs} if n not in mine or n not in theirs or mine[n] != theirs[n]]
    if wrong:
        raise TrainerError(
            f"the reference model differs from the policy in {len(wrong)} tensors: {sorted(wrong)[:5]}",
            code="TRN104",
            where=f"{key} = {other.path}, rollout.hf_checkpoint = {policy.path}",
            fix="name a model of the same architecture and vocabulary",
        )
