"""Samples of a pack in, its MicroBatch out: segments end to end, shared prompts once, in front of all responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slime_core.trainers.pack import make_packs, prompts_of
from slime_core.types import Batch, MicroBatch

if TYPE_CHECKING:
    from slime_core.trainers.portion import Portion

Ints = NDArray[np.int64]


def micro_batch(batch: Batch, members: Ints, real: bool, prompt_of: Ints, weights: NDArray[np.float32]) -> MicroBatch:
    """Pack ``members`` in their order; without ``real`` no response row is trained on.

    Columns are the batch's, ``loss_mask``, and ``sample``: a number a sequence of the pack, int64.

    Args:
        prompt_of: [S], an id a prompt; members with the same id share it
        weights: [R], of the optimizer step
    """
    heads, prefix_of = _shared(prompt_of[members])
    owners = np.concatenate([members[heads], members]).astype(np.int64)
    prompts, responses = batch.lengths - batch.response_lengths, batch.response_lengths
    prefix = np.concatenate([np.full(len(heads), -1), prefix_of]).astype(np.int32)
    skipped = np.where(prefix >= 0, prompts[owners], 0)
    lengths = batch.lengths[owners] - skipped
    lengths[: len(heads)] = prompts[members[heads]]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    tokens = batch.tokens[rows + np.repeat(batch.offsets[owners] + skipped, lengths)].astype(np.int64)

    counts = responses[members] * real
    before = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(before[-1]) - np.repeat(before[:-1], counts)
    ends = cu[len(heads) + 1 :]
    at = np.repeat(ends - responses[members], counts) + within
    prompt_ends = np.where(prefix_of >= 0, cu[1:][prefix_of], ends - responses[members])
    predict = np.where(within == 0, np.repeat(prompt_ends, counts), at) - 1
    response = np.repeat(batch.response_offsets[members], counts) + within
    columns = {name: values[response] for name, values in batch.columns.items()}
    columns["loss_mask"], columns["sample"] = batch.loss_mask[response], np.repeat(np.arange(len(members)), counts)
    return MicroBatch(
        samples=owners,
        tokens=tokens,
        position_ids=rows + np.repeat(skipped, lengths),
        cu_seqlens=cu.astype(np.int32),
        prefix=prefix,
        predict=predict,
        target=tokens[at],
        response=response,
        weight=weights[response],
        columns=columns,
        temperature=np.repeat(batch.temperature[members], counts) if batch.temperature is not None else None,
    )


def _shared(prompts: Ints) -> tuple[Ints, Ints]:
    """Places of the first member of each prompt that several have, and for each member its prompt's number or -1."""
    _, first, inverse, count = np.unique(prompts, return_index=True, return_inverse=True, return_counts=True)
    shared = count > 1
    order = np.argsort(first[shared])
    number = np.full(len(count), -1, dtype=np.int64)
    number[np.flatnonzero(shared)[order]] = np.arange(len(order))
    return first[shared][order], number[inverse]


def pack(portion: Portion, *, max_tokens: int, alone: bool = False) -> list[list[MicroBatch]]:
    """Optimizer steps of micro-batches, as many in each as every rank has.

    Args:
        max_tokens: tokens of a micro-batch at most; a longer sample is alone in one
        alone: one sequence a micro-batch, for models that cannot be packed
    """
    batch, weights, steps = portion.batch, portion.weights, []
    prompt_of = np.arange(len(batch)) if alone else prompts_of(batch)
    for step, count in enumerate(portion.longest if alone else portion.rounds):
        samples = np.flatnonzero(portion.step_of == step)
        packs = make_packs(batch, samples[portion.real[samples]], prompt_of, 1 if alone else max_tokens, count)
        shortest = samples[[np.argmin(batch.lengths[samples])]]
        given = [(members, True) for members in packs] + [(shortest, False)] * (count - len(packs))
        steps.append([micro_batch(batch, *one, prompt_of, weights) for one in given])
    return steps
