"""A step's Batch in, its optimizer steps as packed micro-batches out, for one data-parallel rank.

    rollouts --optimizer steps--> samples --sorted by length, cut into packs--> packs --dealt to ranks--> MicroBatch

Deterministic, nothing padded. Every rank gets the same number of micro-batches in every optimizer step, because all
take part in each collective; a rank that would be short repeats the shortest sequence, with no response row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slime_core.algo.aggregate import token_weights
from slime_core.types import Batch, MicroBatch

Ints = NDArray[np.int64]


def pack(
    batch: Batch,
    *,
    max_tokens: int,
    num_steps: int = 1,
    global_batch_size: int = 0,
    aggregation: str = "rollout_mean",
    alone: bool = False,
    rank: int = 0,
    world: int = 1,
) -> list[list[MicroBatch]]:
    """Optimizer steps of micro-batches.

    Args:
        max_tokens: tokens of a micro-batch at most; a longer sample is alone in one
        num_steps: optimizer steps, of rollouts in batch order, as equal as they can be
        global_batch_size: rollouts an optimizer step, which then decides instead; the last step takes the rest
        aggregation: "rollout_mean" or "token_mean", see `aggregate.token_weights`
        alone: one sequence a micro-batch, for models that cannot be packed
        rank, world: whose share
    """
    weights, steps = np.zeros(len(batch.loss_mask), dtype=np.float32), []
    of_token = batch.sample_of_token()
    for rollouts in split_rollouts(batch, num_steps, global_batch_size):
        samples = np.flatnonzero(np.isin(batch.rollout, rollouts))
        mine = np.isin(of_token, samples)
        weights[mine] = token_weights(batch.loss_mask[mine], batch.rollout[of_token[mine]], len(rollouts), aggregation)
        packs = make_packs(batch.lengths, samples, 1 if alone else max_tokens, world)
        steps.append([_micro_batch(batch, members, weights) for members in _share(packs, batch.lengths, rank, world)])
    return steps


def split_rollouts(batch: Batch, num_steps: int, global_batch_size: int) -> list[Ints]:
    """Rollout ids of each optimizer step, in batch order; fan-out siblings stay together, no step is empty."""
    ids, first = np.unique(batch.rollout, return_index=True)
    ordered = ids[np.argsort(first)].astype(np.int64)
    if global_batch_size:
        return [ordered[i : i + global_batch_size] for i in range(0, len(ordered), global_batch_size)]
    return [part for part in np.array_split(ordered, num_steps) if len(part)]


def make_packs(lengths: Ints, samples: Ints, max_tokens: int, world: int = 1) -> list[Ints]:
    """Samples in packs of at most ``max_tokens``, longest first, each pack of similar lengths; longer ones alone.

    The number of packs is the smallest multiple of ``world`` that fits, where there are samples enough, and their
    sizes are as even as cutting the sorted row allows.
    """
    order = samples[np.lexsort((samples, -lengths[samples]))]
    fewest = len(_cut(lengths[order], max_tokens))
    wanted = min(-(-fewest // world) * world, max(len(order), 1))
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lengths[order], middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return [order[start:stop] for start, stop in _cut(lengths[order], high)]


def _cut(lengths: Ints, limit: int) -> list[tuple[int, int]]:
    """Cuts of a row of lengths into runs of at most ``limit`` in sum, or of one."""
    cuts, start, total = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > start and total + length > limit:
            cuts.append((start, index))
            start, total = index, 0
        total += length
    return [*cuts, (start, len(lengths))] if len(lengths) else []


def _share(packs: Sequence[Ints], lengths: Ints, rank: int, world: int) -> list[tuple[Ints, bool]]:
    """This rank's packs, heaviest first, and whether each is real; all ranks get equally many."""
    if world == 1:
        return [(members, True) for members in packs]
    cost = [(-int(lengths[p].sum()), -int((lengths[p] ** 2).sum()), i) for i, p in enumerate(packs)]
    ordered = [packs[i] for *_, i in sorted(cost)]
    mine = [(members, True) for members in ordered[rank::world]]
    shortest = ordered[-1][-1:]
    return mine + [(shortest, False)] * (-(-len(packs) // world) - len(mine))


def _micro_batch(batch: Batch, share: tuple[Ints, bool], weights: NDArray[np.float32]) -> MicroBatch:
    members, real = share
    lengths, responses = batch.lengths[members], batch.response_lengths[members] * real
    cu = np.concatenate([[0], np.cumsum(lengths)])
    ends, token_starts = cu[1:], np.repeat(batch.offsets[members] - cu[:-1], lengths)
    rows = np.arange(cu[-1])
    before = np.concatenate([[0], np.cumsum(responses)])
    within = np.arange(before[-1]) - np.repeat(before[:-1], responses)
    tokens = batch.tokens[rows + token_starts].astype(np.int64)
    predict = np.repeat(ends - responses, responses) + within - 1
    response = np.repeat(batch.response_offsets[members], responses) + within
    temperature = batch.temperature
    return MicroBatch(
        samples=members,
        tokens=tokens,
        position_ids=rows - np.repeat(cu[:-1], lengths),
        cu_seqlens=cu.astype(np.int32),
        predict=predict,
        target=tokens[predict + 1],
        response=response,
        weight=weights[response],
        columns={name: values[response] for name, values in batch.columns.items()},
        temperature=np.repeat(temperature[members], responses) if temperature is not None else None,
    )
