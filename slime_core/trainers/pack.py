"""A step's Batch in, its optimizer steps as packed micro-batches out, for one data-parallel rank.

    rollouts --optimizer steps--> samples, those of a prompt together --cut--> packs --dealt to ranks--> MicroBatch

Deterministic, nothing padded. A prompt that several samples of a pack have is there once, and they continue it: with
n samples a prompt, its tokens are computed once instead of n times, in the forward and in the backward pass. Every
rank gets the same number of micro-batches in every optimizer step, because all take part in each collective; a rank
that would be short repeats a sequence, with no response row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slime_core.algo.aggregate import token_weights
from slime_core.trainers.micro import micro_batch
from slime_core.types import Batch, MicroBatch

Ints = NDArray[np.int64]


def pack(
    batch: Batch,
    *,
    max_tokens: int,
    num_steps: int = 1,
    global_batch_size: int = 0,
    aggregation: str = "rollout_mean",
    divisor: int = 1,
    alone: bool = False,
    share_prompts: bool = True,
    rank: int = 0,
    world: int = 1,
) -> list[list[MicroBatch]]:
    """Optimizer steps of micro-batches.

    Args:
        max_tokens: tokens of a micro-batch at most; a longer sample is alone in one
        num_steps: optimizer steps, of rollouts in batch order, as equal as they can be
        global_batch_size: rollouts an optimizer step, which then decides instead; the last step takes the rest
        aggregation, divisor: see `aggregate.token_weights`
        alone: one sequence a micro-batch, for models that cannot be packed
        share_prompts: whether samples of a pack share their prompt's tokens
        rank, world: whose share
    """
    weights, steps = np.zeros(len(batch.loss_mask), dtype=np.float32), []
    of_token = batch.sample_of_token()
    share_prompts = share_prompts and not alone
    prompt_of = _prompts(batch) if share_prompts else np.arange(len(batch))
    for rollouts in split_rollouts(batch, num_steps, global_batch_size):
        samples = np.flatnonzero(np.isin(batch.rollout, rollouts))
        mine = np.isin(of_token, samples)
        weights[mine] = token_weights(
            batch.loss_mask[mine], batch.rollout[of_token[mine]], len(rollouts), aggregation, divisor
        )
        packs = make_packs(batch, samples, prompt_of, 1 if alone else max_tokens, world)
        steps.append([micro_batch(batch, *one, prompt_of, weights) for one in _share(packs, batch, rank, world)])
    return steps


def split_rollouts(batch: Batch, num_steps: int, global_batch_size: int) -> list[Ints]:
    """Rollout ids of each optimizer step, in batch order; fan-out siblings stay together, no step is empty."""
    ids, first = np.unique(batch.rollout, return_index=True)
    ordered = ids[np.argsort(first)].astype(np.int64)
    if global_batch_size:
        return [ordered[i : i + global_batch_size] for i in range(0, len(ordered), global_batch_size)]
    return [part for part in np.array_split(ordered, num_steps) if len(part)]


def _prompts(batch: Batch) -> Ints:
    """For each sample the first one that has the same prompt tokens."""
    first: dict[bytes, int] = {}
    ends = batch.offsets[1:] - batch.response_lengths
    found = [first.setdefault(batch.tokens[a:b].tobytes(), i) for i, (a, b) in enumerate(zip(batch.offsets, ends))]
    return np.array(found, dtype=np.int64)


def make_packs(batch: Batch, samples: Ints, prompt_of: Ints, max_tokens: int, world: int = 1) -> list[Ints]:
    """Samples in packs of at most ``max_tokens``; samples of a prompt follow each other, long ones come first.

    The number of packs is the smallest multiple of ``world`` that fits, where there are samples enough, and their
    sizes are as even as cutting the row of samples allows. A pack's own samples are ordered by length.
    """
    lengths, prompts = batch.lengths, batch.lengths - batch.response_lengths
    longest = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(longest, prompt_of[samples], lengths[samples])
    order = samples[np.lexsort((samples, -lengths[samples], prompt_of[samples], -longest[prompt_of[samples]]))]
    row = list(zip(prompt_of[order].tolist(), prompts[order].tolist(), batch.response_lengths[order].tolist()))
    fewest = len(_cut(row, max_tokens))
    wanted = min(-(-fewest // world) * world, max(len(order), 1))
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(row, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    packs = [order[start:stop] for start, stop in _cut(row, high)]
    return [members[np.lexsort((members, -lengths[members]))] for members in packs]


def _cut(row: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[int, int]]:
    """Cuts of a row of (prompt, its tokens, response tokens) into runs of at most ``limit`` tokens, or of one."""
    cuts, start, total, last = [], 0, 0, -1
    for index, (prompt, head, tail) in enumerate(row):
        added = tail + (head if prompt != last else 0)
        if index > start and total + added > limit:
            cuts.append((start, index))
            start, total, added = index, 0, head + tail
        total, last = total + added, prompt
    return [*cuts, (start, len(row))] if row else []


def _share(packs: Sequence[Ints], batch: Batch, rank: int, world: int) -> list[tuple[Ints, bool]]:
    """This rank's packs, heaviest first, and whether each is real; all ranks get equally many."""
    if world == 1:
        return [(members, True) for members in packs]
    lengths = batch.lengths
    cost = [(-int(lengths[p].sum()), -int((lengths[p] ** 2).sum()), i) for i, p in enumerate(packs)]
    ordered = [packs[i] for *_, i in sorted(cost)]
    mine = [(members, True) for members in ordered[rank::world]]
    shortest = ordered[-1][-1:]
    return mine + [(shortest, False)] * (-(-len(packs) // world) - len(mine))
