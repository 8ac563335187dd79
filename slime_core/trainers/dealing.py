"""A stage's batches in, the ranks' Portions out; their columns in, those of the whole batch out.

    Batch --checked, prepared--> Split --> Portion a data-parallel rank --score--> columns of its rows --> of all rows

The driver of several ranks does so, and sends each its own. A worker that is given a whole Batch takes its portion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from slime_core.errors import TrainerError
from slime_core.trainers import checks, critic
from slime_core.trainers.pack import split_rollouts
from slime_core.trainers.portion import Portion, Seat, Split, by_number, rows_of
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.protocols import Loss

    Found = dict[str, Columns]


@dataclass(slots=True, frozen=True)
class Dealer:
    """Deals the batches of one stage, whose [train] section is settled, to ranks like the one in ``seat``."""

    stage: Config
    loss: Loss
    seat: Seat

    def portions(self, batch: Batch) -> list[Portion]:
        """Of every data-parallel rank.

        Raises:
            TrainerError: TRN00 an empty batch, TRN102 a column of another length.
        """
        checks.check_shape(batch)
        train = self.stage.train
        return Split(
            flops=self.seat.flops,
            ranks=self.seat.ranks,
            max_tokens=train.max_tokens_per_gpu * self.seat.over,
            num_steps=train.num_steps_per_rollout,
            global_batch_size=train.global_batch_size,
            aggregation=train.loss_aggregation,
            divisor=train.loss_divisor or self.stage.rollout.rollout_max_response_len,
        ).portions(batch)

    def ready(self, batch: Batch) -> Batch:
        """The batch as a step trains on it, with what its loss makes of whole optimizer steps.

        Raises:
            TrainerError: what :func:`checks.check_columns` and :func:`prepare.prepared` raise.
        """
        checks.check_shape(batch)
        checks.check_columns(batch, self.loss)
        return prepared(batch, self.loss, self.stage.train)

    def step(self, batch: Batch) -> list[Portion]:
        """Portions to train on."""
        batch = self.ready(batch)
        known = critic.explained_variance(batch)
        return [replace(portion, known=known) for portion in self.portions(batch)]

    def joined(self, batch: Batch, portions: Sequence[Portion], found: Sequence[Found]) -> Found:
        """Columns [R] of the whole batch from those of each portion's rows.

        Raises:
            TrainerError: TRN95 a log-prob or value that is not finite.
        """
        whole: Found = {}
        for portion, roles in zip(portions, found, strict=True):
            counts = np.repeat(portion.real, portion.batch.response_lengths)
            rows = rows_of(batch.response_offsets, portion.places)[counts]
            for role, columns in roles.items():
                for name, values in columns.items():
                    known = whole.setdefault(role, {})
                    known.setdefault(name, np.zeros(len(batch.loss_mask), np.float32))[rows] = values[counts]
        for columns in whole.values():
            if "log_probs" in columns:
                checks.check_log_probs(batch, columns["log_probs"])
            if "values" in columns:
                critic.checked(batch, columns["values"])
        return whole

    def gathered(self, batch: Batch, found: Found) -> Found:
        """:meth:`joined` where each rank has the whole batch, and what it found of its portion; a collective."""
        everyone: list[Any] = [(self.seat.number, found)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (self.seat.number, found))
        return self.joined(batch, self.portions(batch), by_number(self.seat.ranks, everyone))


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
    made: Columns = {}
    given = {**batch.columns, "loss_mask": batch.loss_mask, "sample": of_token}
    where = f"step {batch.version}, loss '{loss.name}'"
    for number, rollouts in enumerate(split_rollouts(batch, train.num_steps_per_rollout, train.global_batch_size)):
        mine = np.isin(batch.rollout, rollouts)[of_token]
        answer = loss.prepare({name: values[mine] for name, values in given.items()}, train)
        found = _checked(answer, int(mine.sum()), given, where)
        if number and set(found) != set(made):
            raise _wrong(f"prepare made {sorted(found)} for one optimizer step and {sorted(made)} before", where)
        for name, values in found.items():
            made.setdefault(name, np.zeros((len(of_token), *values.shape[1:]), values.dtype))[mine] = values
    return replace(batch, columns={**batch.columns, **made})


def _checked(answer: Any, rows: int, given: Columns, where: str) -> Columns:
    if not isinstance(answer, dict):
        raise _wrong(f"prepare answered a {type(answer).__name__}, not a dict of columns", where)
    found: Columns = {}
    for name, values in answer.items():
        array: NDArray[Any] = np.asarray(values)
        if name in given:
            raise _wrong(f"prepare made the column {name}, which the batch has already", where)
        if array.shape[:1] != (rows,):
            raise _wrong(f"prepare made column {name} of shape {array.shape} for {rows} tokens", where)
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise TrainerError(
                f"prepare made column {name} with a value that is no finite number", code="TRN95", where=where
            )
        found[name] = array
    return found


def _wrong(what: str, where: str) -> TrainerError:
    return TrainerError(what, code="TRN102", where=where, fix="answer a dict: name to one number a token of the step")
