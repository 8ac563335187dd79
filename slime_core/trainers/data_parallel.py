"""Partition a step's Batch over data-parallel ranks, and join the columns of their rows.

    rollouts --optimizer steps--> samples --chunks of a prompt, Karmarkar-Karp over FLOPs--> a RankBatch a rank
    RankBatch --score--> columns of its rows --> columns of all rows

A token's weight is that of its whole optimizer step, so no split changes the loss. Samples are whole; those of a
prompt stay together as far as ranks are then as evenly loaded: a pack computes a prompt that several share once.

The driver of several ranks sends each its own. A worker that gets a whole Batch partitions it itself.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.algorithms.shared.aggregate import sample_weights
from slime_core.config.sections.train import FEW_TOKENS
from slime_core.errors import SlimeError, TrainerError
from slime_core.trainers.batch import check_columns, check_finite, check_shape, prepared
from slime_core.trainers.packing import fewest_packs, make_packs, micro_batch, prompts_of, split_rollouts
from slime_core.types import Batch, Columns, MicroBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.protocols import Loss
    from slime_core.trainers.media import BatchMedia
    from slime_core.weights.flops import Flops

    ColumnsByRole = dict[str, Columns]

EVEN = 1.01  # heaviest rank over the mean, or the heaviest sample, at which no prompt's samples are split any further
CRITIC_COLUMNS = ("values", "returns")
Ints = Any  # NDArray[np.int64]


@dataclass(slots=True, frozen=True, kw_only=True)
class DataParallelRank:
    """A worker's data-parallel rank: workers of one ``number`` compute the same samples together."""

    number: int  # counted from 0
    size: int  # data-parallel ranks
    flops: Flops
    context_parallel: int = 1  # ranks that share each sequence
    multiple: int = 1  # of which the micro-batches of an optimizer step are a multiple
    tokens: int = FEW_TOKENS  # of a rank's micro-batch, where the [train] section does not say

    def most_tokens(self, train: Any) -> int:
        """Tokens of a micro-batch at most, over the ranks that share its sequences."""
        return int(train.max_tokens_per_gpu or self.tokens) * self.context_parallel


@dataclass(slots=True, kw_only=True)
class RankBatch:
    """One data-parallel rank's samples of a step, in the order of the whole Batch.

    Every rank has the same number of micro-batches in an optimizer step, because all take part in each collective:
    ``rounds`` where packs hold as many tokens as they may, ``longest`` where each holds one sequence. A rank without
    a sample in an optimizer step has one that is not ``real``: it is computed, and none of its rows is trained on.
    """

    batch: Batch
    number: int  # of the data-parallel rank
    scale: NDArray[np.float32]  # S, weight of each trainable token in the loss of its whole optimizer step
    step_of: NDArray[np.int64]  # S, optimizer step
    real: NDArray[np.bool_]  # S
    places: NDArray[np.int64]  # S, index in the whole Batch
    rounds: list[int]  # by optimizer step: micro-batches of every rank
    longest: list[int]  # by optimizer step: the same, of one sequence each
    ids: list[str]  # of all samples of the whole Batch, for errors
    stamp: int  # checksum of the whole Batch
    trained: float  # trainable tokens of the whole Batch
    metrics: dict[str, float] = field(default_factory=dict)  # further ones of the whole Batch

    @property
    def weights(self) -> NDArray[np.float32]:
        """R, of each response token in the loss of its optimizer step; 0 where masked."""
        return self.batch.loss_mask * np.repeat(self.scale, self.batch.response_lengths)


@dataclass(slots=True, frozen=True, kw_only=True)
class BatchSplit:
    """How batches are divided over data-parallel ``ranks``.

    ``num_steps`` optimizer steps of rollouts in batch order are as equal as they can be; ``global_batch_size``
    rollouts a step decide instead where given, and the last step takes the rest. ``max_tokens`` a micro-batch, of
    which there are a ``multiple``.
    """

    flops: Flops
    ranks: int = 1
    max_tokens: int = 1
    multiple: int = 1
    num_steps: int = 1
    global_batch_size: int = 0
    aggregation: str = "rollout_mean"  # this and the divisor: `aggregate.token_weights`
    divisor: int = 1

    def partition(self, batch: Batch) -> list[RankBatch]:
        """Partition a batch, a RankBatch a rank; with one rank its batch is the Batch itself."""
        scale = np.zeros(len(batch), dtype=np.float32)
        ends = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.float64)])[batch.response_offsets]
        trainable, prompt_of = np.diff(ends), prompts_of(batch)
        step_of = np.zeros(len(batch), dtype=np.int64)
        assigned: list[list[Ints]] = []
        for number, rollouts in enumerate(split_rollouts(batch, self.num_steps, self.global_batch_size)):
            members = np.flatnonzero(np.isin(batch.rollout, rollouts))
            step_of[members] = number
            scale[members] = sample_weights(
                trainable[members], batch.rollout[members], len(rollouts), self.aggregation, self.divisor
            )
            assigned.append(assign_samples(batch, members, prompt_of, self.flops, self.ranks))
        rounds = [max(fewest_packs(batch, r, prompt_of, self.max_tokens) for r in ranks) for ranks in assigned]
        names = json.dumps([batch.version, batch.stage, batch.sample_ids, sorted(batch.columns)])
        whole: dict[str, Any] = {
            "rounds": [self._rounded(count) for count in rounds],
            "longest": [self._rounded(max(map(len, ranks))) for ranks in assigned],
            "ids": batch.sample_ids,
            "stamp": zlib.crc32(names.encode()),
            "trained": float(trainable.sum()),
        }
        if self.ranks == 1:
            every = np.arange(len(batch))
            return [
                RankBatch(batch=batch, number=0, scale=scale, step_of=step_of, real=every >= 0, places=every, **whole)
            ]
        rank_batches = []
        for number in range(self.ranks):
            places, real = _with_fillers(batch, [ranks[number] for ranks in assigned], assigned)
            rank_batches.append(
                RankBatch(
                    batch=take(batch, places),
                    number=number,
                    scale=scale[places],
                    step_of=step_of[places],
                    real=real,
                    places=places,
                    **whole,
                )
            )
        return rank_batches

    def _rounded(self, count: int) -> int:
        """A number of micro-batches, up to a multiple."""
        return -(-count // self.multiple) * self.multiple


def assign_samples(batch: Batch, samples: Ints, prompt_of: Ints, flops: Flops, ranks: int) -> list[Ints]:
    """Assign the samples of one optimizer step to ranks, so that the heaviest rank computes as little as possible.

    Chunks of a prompt's samples are assigned by :func:`karmarkar_karp`: first whole prompts, then halves of the
    largest, down to single samples, until the ranks are even. A prompt that two ranks have is computed by both.

    Args:
        prompt_of: [S], an id a prompt; members with the same id share it
    """
    if ranks == 1:
        return [samples]
    lengths = batch.lengths
    starts = lengths - batch.response_lengths
    head, tail = (part.tolist() for part in _operations(batch, starts, flops))
    owner, by_prompt = prompt_of.tolist(), dict[int, list[int]]()
    for sample in sorted(samples.tolist(), key=lambda i: -tail[i]):
        by_prompt.setdefault(owner[sample], []).append(sample)

    def cost(members: Sequence[int]) -> float:
        prompts = {owner[i] for i in members}
        return float(sum(tail[i] for i in members) + sum(head[prompt] for prompt in prompts))

    longest = max(tail[sample] + head[owner[sample]] for sample in samples.tolist())
    least = max(cost(samples.tolist()) / ranks, longest)
    chunk = max(map(len, by_prompt.values()), default=1)
    best, best_parts = float("inf"), [samples]
    while True:
        units = [row[i : i + chunk] for row in by_prompt.values() for i in range(0, len(row), chunk)]
        parts = karmarkar_karp([cost(unit) for unit in units], ranks)
        candidate = [[sample for i in part for sample in units[i]] for part in parts]
        heaviest = max(map(cost, candidate))
        if heaviest < best:
            best, best_parts = heaviest, [np.array(sorted(part), dtype=np.int64) for part in candidate]
        if best <= EVEN * least or chunk == 1:
            return best_parts
        chunk = -(-chunk // 2)


def _operations(batch: Batch, starts: Ints, flops: Flops) -> tuple[Ints, Ints]:
    """[S] of each sample's prompt, which has ``starts`` tokens, and of its response; pictures where they lie."""
    head, tail = flops.sequence(starts), flops.sequence(batch.lengths, starts)
    if batch.multimodal is not None and flops.tower is not None:
        places, costs = flops.tower.pictures(batch.tokens)
        owners = np.searchsorted(batch.offsets, places, side="right") - 1
        prompts = places - batch.offsets[owners] < starts[owners]
        np.add.at(head, owners[prompts], costs[prompts])
        np.add.at(tail, owners[~prompts], costs[~prompts])
    return head, tail


def _with_fillers(batch: Batch, batches: list[Ints], assigned: list[list[Ints]]) -> tuple[Ints, NDArray[np.bool_]]:
    """A rank's samples of all optimizer steps, in batch order, and which are real; each step has one at least."""
    fillers = []
    for batch_samples, ranks in zip(batches, assigned):
        if not len(batch_samples):
            everyone = np.concatenate(ranks)
            fillers.append(everyone[np.argmin(batch.lengths[everyone])])
    places = np.concatenate([*batches, np.array(fillers, dtype=np.int64)]).astype(np.int64)
    order = np.argsort(places, kind="stable")
    return places[order], (np.arange(len(places)) < len(places) - len(fillers))[order]


def rows_of(offsets: NDArray[np.int64], places: Ints) -> Ints:
    """Rows of flat arrays that samples own, sample after sample."""
    counts = offsets[places + 1] - offsets[places]
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(offsets[places] - before, counts)


def take(batch: Batch, places: Ints) -> Batch:
    """A Batch of these samples, one at least."""

    def rows(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
        parts = zip(offsets[places].tolist(), offsets[places + 1].tolist())
        return np.concatenate([values[start:stop] for start, stop in parts])  # faster than an index a row

    def chosen(values: Any) -> Any:
        return [values[i] for i in places.tolist()] if values else values

    def ends(lengths: Ints) -> Ints:
        return np.concatenate([[0], np.cumsum(lengths[places])]).astype(np.int64)

    return Batch(
        version=batch.version,
        stage=batch.stage,
        sample_ids=chosen(batch.sample_ids),
        tasks=chosen(batch.tasks),
        roles=chosen(batch.roles),
        models=chosen(batch.models),
        group=batch.group[places],
        rollout=batch.rollout[places],
        reward=batch.reward[places],
        tokens=rows(batch.tokens, batch.offsets),
        offsets=ends(batch.lengths),
        loss_mask=rows(batch.loss_mask, batch.response_offsets),
        response_offsets=ends(batch.response_lengths),
        columns={name: rows(values, batch.response_offsets) for name, values in batch.columns.items()},
        temperature=batch.temperature[places] if batch.temperature is not None else None,
        multimodal=chosen(batch.multimodal),
        routed_experts=chosen(batch.routed_experts),
        train_metadata=chosen(batch.train_metadata),
    )


def pack(
    rank_batch: RankBatch, *, max_tokens: int, alone: bool = False, media: BatchMedia | None = None
) -> list[list[MicroBatch]]:
    """Optimizer steps of micro-batches, as many in each as every rank has.

    Args:
        max_tokens: tokens of a micro-batch at most; a longer sample is alone in one
        alone: one sequence a micro-batch, for models that cannot be packed
        media: of a model that sees pictures
    """
    batch, weights, steps = rank_batch.batch, rank_batch.weights, []
    prompt_of = np.arange(len(batch)) if alone else prompts_of(batch)
    for step, count in enumerate(rank_batch.longest if alone else rank_batch.rounds):
        samples = np.flatnonzero(rank_batch.step_of == step)
        packs = make_packs(batch, samples[rank_batch.real[samples]], prompt_of, 1 if alone else max_tokens, count)
        shortest = samples[[np.argmin(batch.lengths[samples])]]
        groups = [(members, True) for members in packs] + [(shortest, False)] * (count - len(packs))
        steps.append([micro_batch(batch, *one, prompt_of, weights, media) for one in groups])
    return steps


@dataclass(slots=True, frozen=True)
class Partitioner:
    """Partition the batches of one stage, whose [train] section is settled, over ranks like ``dp_rank``."""

    stage: Config
    loss: Loss
    dp_rank: DataParallelRank

    def partition(self, batch: Batch) -> list[RankBatch]:
        """Partition a batch over the data-parallel ranks.

        Raises:
            TrainerError: TRN00 an empty batch, TRN102 a column of another length.
        """
        check_shape(batch)
        train = self.stage.train
        return BatchSplit(
            flops=self.dp_rank.flops,
            ranks=self.dp_rank.size,
            max_tokens=self.dp_rank.most_tokens(train),
            multiple=self.dp_rank.multiple,
            num_steps=train.num_steps_per_rollout,
            global_batch_size=train.global_batch_size,
            aggregation=train.loss_aggregation,
            divisor=train.loss_divisor or self.stage.rollout.rollout_max_response_len,
        ).partition(batch)

    def prepare(self, batch: Batch) -> Batch:
        """Check a batch and add the columns that its loss computes from whole optimizer steps.

        Raises:
            TrainerError: what :func:`batch.check_columns` and :func:`batch.prepared` raise.
        """
        check_shape(batch)
        check_columns(batch, self.loss.columns, f"the loss '{self.loss.name}' reads")
        return prepared(batch, self.loss, self.stage.train)

    def partition_step(self, batch: Batch) -> list[RankBatch]:
        """Return the rank batches to train on."""
        batch = self.prepare(batch)
        metrics = explained_variance(batch)
        return [replace(rank_batch, metrics=metrics) for rank_batch in self.partition(batch)]

    def join(self, batch: Batch, rank_batches: Sequence[RankBatch], answers: Sequence[ColumnsByRole]) -> ColumnsByRole:
        """Join the columns of rank batches to columns [R] of the whole batch.

        Raises:
            TrainerError: TRN95 a log-prob or value that is not finite.
        """
        whole: ColumnsByRole = {}
        for rank_batch, roles in zip(rank_batches, answers, strict=True):
            counts = np.repeat(rank_batch.real, rank_batch.batch.response_lengths)
            rows = rows_of(batch.response_offsets, rank_batch.places)[counts]
            for role, columns in roles.items():
                for name, values in columns.items():
                    columns_of_role = whole.setdefault(role, {})
                    columns_of_role.setdefault(name, np.zeros(len(batch.loss_mask), np.float32))[rows] = values[counts]
        for columns in whole.values():
            if "log_probs" in columns:
                reason = "the weights or a logit are not finite"
                check_finite(batch, columns["log_probs"], "log-prob", why=reason)
            if "values" in columns:
                reason = "the critic's weights are not finite"
                check_finite(batch, columns["values"], "value", why=reason, fix="lower train.critic_lr")
        return whole

    def gather(self, batch: Batch, columns: ColumnsByRole) -> ColumnsByRole:
        """:meth:`join` where each rank has the whole batch and the columns of its rank batch; a collective."""
        import torch.distributed as dist

        everyone: list[Any] = [(self.dp_rank.number, columns)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (self.dp_rank.number, columns))
        return self.join(batch, self.partition(batch), by_number(self.dp_rank.size, everyone))


def by_number(ranks: int, answers: Sequence[tuple[int, dict[Any, Columns]]]) -> list[dict[Any, Columns]]:
    """One answer a data-parallel rank, of (its number, the answer): ranks that share its sequences may say nothing."""
    columns: list[dict[Any, Columns]] = [{} for _ in range(ranks)]
    for number, answer in answers:
        columns[number] = columns[number] or answer
    return columns


def explained_variance(batch: Batch) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over the step's trainable tokens, before the step, in float64.

    1 is a perfect critic, 0 one that knows the mean, below 0 worse. Left out where returns do not vary, and of batches
    without these columns.
    """
    trained = batch.loss_mask > 0
    if not trained.any() or not set(CRITIC_COLUMNS) <= batch.columns.keys():
        return {}
    values, returns = (np.asarray(batch.columns[name], dtype=np.float64)[trained] for name in CRITIC_COLUMNS)
    spread = float(np.mean((returns - returns.mean()) ** 2))
    if spread == 0 or not np.isfinite(spread):
        return {}
    error = returns - values
    return {"explained_variance": 1.0 - float(np.mean((error - error.mean()) ** 2)) / spread}


def agreed(check: Callable[[], None], stamp: int, version: int, rank: int, world: int) -> None:
    """Make a check of what this rank was given; where it fails on one rank, it fails on all; a collective.

    Raises:
        SlimeError: the check's, of the first rank that has one.
        TrainerError: TRN106 ranks whose stamps differ from those of most, with their numbers.
    """
    import torch
    import torch.distributed as dist

    error: SlimeError | None = None
    try:
        check()
    except SlimeError as failure:
        error = failure
    if world == 1:
        if error is not None:
            raise error
        return
    local_row = torch.tensor([stamp, error is not None], dtype=torch.int64)
    rows = [torch.empty_like(local_row) for _ in range(world)]
    dist.all_gather(rows, local_row)
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


Part = tuple[float, list[int]]
"""Sum of costs, and whose they are."""


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide indices into ``parts`` lists of about equal sums, the heaviest first; some are empty where costs are few.

    The largest differencing method (Karmarkar and Karp 1982; for more than two parts Korf 1998): every cost begins as
    a partition of its own, with empty parts beside it. The two partitions whose sums differ most become one, the
    heaviest part of either with the lightest of the other, until one is left. O(n log n) such steps.

    Example: karmarkar_karp([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]   # 16 and 14
    """
    heap = [(-cost, number, [(cost, [number])]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    fresh = len(heap)  # breaks ties alike everywhere
    while len(heap) > 1:
        *_, one = heapq.heappop(heap)
        *_, other = heapq.heappop(heap)
        both = _joined(one, other, parts)
        least = both[-1][0] if len(both) == parts else 0.0
        heapq.heappush(heap, (least - both[0][0], fresh, both))
        fresh += 1
    partition = [sorted(members) for _, members in heap[0][2]] if heap else []
    return partition + [[] for _ in range(parts - len(partition))]


def _joined(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Two partitions as one, heaviest first: the heaviest of ``one`` with the lightest of ``other``, and so on."""
    gap = parts - len(other)  # parts of ``other`` that are empty meet the heaviest of ``one``
    merged = one[:gap]
    for (cost, members), (more, others) in zip(one[gap:], reversed(other)):
        merged.append((cost + more, members + others))
    alone = len(other) - max(len(one) - gap, 0)
    return sorted([*merged, *other[:alone]], key=lambda part: -part[0])
