"""A step's Batch in, the Batch with the columns that its loss makes of whole optimizer steps out.

A loss may need a statistic of all tokens that one optimizer step trains on (a mean of importance weights). It is made
once a step, before packing, from columns that every rank holds: no rank asks another, and no split changes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import TrainerError
from slime_core.trainers.pack import split_rollouts
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Loss


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
