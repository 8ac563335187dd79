"""Partition of a step's samples into optimizer steps, of those into packs, and a pack as a MicroBatch.

    samples of an optimizer step, those of a prompt together --cut--> packs

Deterministic, nothing padded. A prompt that several samples of a pack have is there once, and they continue it: with
n samples a prompt, its tokens are computed once instead of n times, in the forward and in the backward pass. A rank
with fewer packs than the others repeats a sequence, with no response row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.trainers.media import BatchMedia, PackMedia, PlacedItem, media_keys
from slime_core.types import Batch, MicroBatch

Ints = NDArray[np.int64]
SPREAD = 2
"""Attention reads a shared prompt once for each sample: rows of a pack's whole sequences, in times of its tokens."""


def split_rollouts(batch: Batch, num_steps: int, global_batch_size: int) -> list[Ints]:
    """Rollout ids of each optimizer step, in batch order; fan-out siblings stay together, no step is empty."""
    ids, first = np.unique(batch.rollout, return_index=True)
    ordered = ids[np.argsort(first)].astype(np.int64)
    if global_batch_size:
        return [ordered[i : i + global_batch_size] for i in range(0, len(ordered), global_batch_size)]
    return [part for part in np.array_split(ordered, num_steps) if len(part)]


def prompts_of(batch: Batch) -> Ints:
    """For each sample the first one that has the same prompt tokens and pictures; itself where routed experts are
    replayed, which an engine may choose anew for every sample."""
    if batch.routed_experts is not None:
        return np.arange(len(batch))
    first: dict[tuple[bytes, tuple[Any, ...]], int] = {}
    bounds = zip(batch.offsets, batch.offsets[1:] - batch.response_lengths, media_keys(batch))
    prompts = [first.setdefault((batch.tokens[a:b].tobytes(), key), i) for i, (a, b, key) in enumerate(bounds)]
    return np.array(prompts, dtype=np.int64)


def fewest_packs(batch: Batch, samples: Ints, prompt_of: Ints, max_tokens: int) -> int:
    """Packs that :func:`make_packs` needs at least."""
    return len(_cut(_row(batch, _ordered(batch, samples, prompt_of), prompt_of), max_tokens, SPREAD * max_tokens))


def make_packs(batch: Batch, samples: Ints, prompt_of: Ints, max_tokens: int, count: int) -> list[Ints]:
    """Samples in packs of at most ``max_tokens``; samples of a prompt follow each other, long ones come first.

    There are ``count`` packs, enough by :func:`fewest_packs`, where there are samples enough, and their sizes are as
    even as cutting the row of samples allows. A pack's own samples are ordered by length.
    """
    if not len(samples):
        return []
    order = _ordered(batch, samples, prompt_of)
    row, number = _row(batch, order, prompt_of), min(count, len(order))
    low, high, spread = 1, max_tokens, SPREAD * max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(row, middle, spread)) <= number:
            high = middle
        else:
            low = middle + 1
    cuts = _cut(row, high, spread)
    while len(cuts) < number:  # no limit cuts the row into exactly so many: halve the longest run
        at = max(range(len(cuts)), key=lambda i: cuts[i][1] - cuts[i][0])
        start, stop = cuts[at]
        cuts[at : at + 1] = [(start, (start + stop + 1) // 2), ((start + stop + 1) // 2, stop)]
    packs = [order[start:stop] for start, stop in cuts]
    return [members[np.lexsort((members, -batch.lengths[members]))] for members in packs]


def _ordered(batch: Batch, samples: Ints, prompt_of: Ints) -> Ints:
    """Samples by prompt, the prompt with the longest sample first."""
    lengths, longest = batch.lengths, np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(longest, prompt_of[samples], lengths[samples])
    return samples[np.lexsort((samples, -lengths[samples], prompt_of[samples], -longest[prompt_of[samples]]))]


def _row(batch: Batch, order: Ints, prompt_of: Ints) -> list[tuple[int, int, int]]:
    """Prompt, its tokens and the response's, of each sample."""
    responses = batch.response_lengths[order]
    prompts = batch.lengths[order] - responses
    return list(zip(prompt_of[order].tolist(), prompts.tolist(), responses.tolist()))


def _cut(row: Sequence[tuple[int, int, int]], limit: int, spread: int) -> list[tuple[int, int]]:
    """Cuts of a row of (prompt, its tokens, response tokens) into runs of at most ``limit`` tokens, or of one sample.

    With a prompt counted for each of its samples, a run has at most ``spread`` tokens.
    """
    cuts, start, total, apart, last = [], 0, 0, 0, -1
    for index, (prompt, head, tail) in enumerate(row):
        added = tail + (head if prompt != last else 0)
        if index > start and (total + added > limit or apart + head + tail > spread):
            cuts.append((start, index))
            start, total, apart, added = index, 0, 0, head + tail
        total, apart, last = total + added, apart + head + tail, prompt
    return [*cuts, (start, len(row))] if row else []


def micro_batch(
    batch: Batch,
    members: Ints,
    real: bool,
    prompt_of: Ints,
    weights: NDArray[np.float32],
    media: BatchMedia | None = None,
) -> MicroBatch:
    """Pack ``members`` in their order; without ``real`` no response row is trained on.

    Columns are the batch's, ``loss_mask``, and ``sample``: a number a sequence of the pack, int64.

    Args:
        prompt_of: [S], an id a prompt; members with the same id share it
        weights: [R], of the optimizer step
        media: of a model that sees pictures
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
    positions = rows + np.repeat(skipped, lengths)
    pictures, positions = (None, positions) if media is None else _media(media, batch, owners, skipped, cu, positions)
    return MicroBatch(
        samples=owners,
        tokens=tokens,
        position_ids=positions,
        cu_seqlens=cu.astype(np.int32),
        prefix=prefix,
        predict=predict,
        target=tokens[at],
        response=response,
        weight=weights[response],
        columns=columns,
        temperature=np.repeat(batch.temperature[members], counts) if batch.temperature is not None else None,
        media=pictures,
        filler=not real,
    )


def _media(
    media: BatchMedia, batch: Batch, owners: Ints, skipped: Ints, cu: Ints, positions: Ints
) -> tuple[PackMedia | None, Ints]:
    """Items of a pack, and the positions of its tokens, [T] or for a model of three axes [3, T].

    Args:
        owners, skipped: of each segment its sample, and the tokens of that sample that come before it
        positions: [T], in each sample
    """
    if media.layout.three_axes:
        positions = np.repeat(positions[None], 3, axis=0)
    items = []
    for number, (owner, first) in enumerate(zip(owners.tolist(), skipped.tolist())):
        places, axes = media.places(batch, owner)
        start, stop = cu[number : number + 2].tolist()
        if axes is not None:
            positions[:, start:stop] = axes[:, first : first + stop - start]
        arrays = batch.multimodal[owner] if batch.multimodal is not None else None
        inside = [pair for pair in places if first <= pair[0] < first + stop - start]
        items += [PlacedItem(item, start + place - first, arrays or {}) for place, item in inside]
    return PackMedia(items, media.folder) if items else None, positions


def _shared(prompts: Ints) -> tuple[Ints, Ints]:
    """Places of the first member of each prompt that several have, and for each member its prompt's number or -1."""
    _, first, inverse, count = np.unique(prompts, return_index=True, return_inverse=True, return_counts=True)
    shared = count > 1
    order = np.argsort(first[shared])
    number = np.full(len(count), -1, dtype=np.int64)
    number[np.flatnonzero(shared)[order]] = np.arange(len(order))
    return first[shared][order], number[inverse]
