"""Routing replay: the experts of each row of a micro-batch, from the engine or from the pass of the old log-probs.

    rollout   sample.rollout_routed_experts -> rows [T, layers, k] of a pack -> scoring and training passes
    policy    scoring pass of the policy -> its choices, by micro-batch -> training passes

A row that nobody recorded (the last token of a sample, an observation after the last turn, filling) has -1 for every
expert: the router chooses itself. No trained token depends on such a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from slime_core.errors import TrainerError
from slime_core.ledger.segments import read_array
from slime_core.weights.routers import NOT_CHOSEN

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from slime_core.trainers.data_parallel import RankBatch
    from slime_core.types import Batch, MicroBatch

Source = Literal["none", "engine", "record", "recorded"]
"""What a pass does: nothing, replay the engine's rows, record its own, replay those that were recorded."""


class RoutingReplay:
    """What each pass of a rank replays.

    Args:
        kind: ``train.routing_replay`` of the stage, "off" where it does not generate
        segments: the run's folder of arrays
        layers: of the model, which have experts
        top_k: experts a token
        experts: of a layer
    """

    def __init__(self, kind: str, segments: Path, layers: list[int], top_k: int, experts: int) -> None:
        self.kind, self._segments, self._layers, self._top_k = kind, segments, layers, top_k
        self._experts = experts
        self._recorded: dict[tuple[bytes, bytes], NDArray[np.int16]] = {}

    def source(self, batch: Batch, role: str) -> Source:
        """What a pass over ``batch`` for a role, or ``train``, does; a probe's batch has no experts to replay."""
        if role not in ("policy", "old_policy", "train") or self.kind == "off":
            return "none"
        if self.kind == "rollout":
            return "none" if batch.routed_experts is None else "engine"
        return "recorded" if role == "train" else "record"

    def record(self, micro: MicroBatch, choices: torch.Tensor) -> None:
        """Keep what a micro-batch's scoring pass chose, [T, layers, k], in host memory until :meth:`forget`."""
        self._recorded[_key(micro)] = choices.short().cpu().numpy()

    def recorded(self, micro: MicroBatch) -> NDArray[np.int16]:
        """What :meth:`record` kept of a micro-batch.

        Raises:
            TrainerError: TRN110, it was not scored.
        """
        if (key := _key(micro)) in self._recorded:
            return self._recorded[key]
        raise TrainerError(
            "the experts of a micro-batch were not recorded",
            code="TRN110",
            where="train.routing_replay = policy",
            why="they are those of the pass that makes the old log-probs, and it was not made for this batch",
            fix="--routing-replay rollout   or   --routing-replay off",
        )

    def forget(self) -> None:
        """Drop what was recorded for the last batch."""
        self._recorded.clear()

    def check(self, rank_batch: RankBatch) -> None:
        """Refuse a batch to train on in which a sample's experts are missing or do not fit.

        Raises:
            TrainerError: TRN110 with the sample.
        """
        batch = rank_batch.batch
        if self.kind != "rollout":
            return
        for number, name in enumerate(batch.sample_ids):
            trained = np.flatnonzero(
                batch.loss_mask[batch.response_offsets[number] : batch.response_offsets[number + 1]]
            )
            if not len(trained):
                continue
            needed = int(batch.lengths[number] - batch.response_lengths[number] + trained[-1])
            experts = batch.routed_experts[number] if batch.routed_experts is not None else None
            if experts is None:
                raise _unfit(name, "has no routed experts", "the engine that made it recorded none")
            rows, *shape = experts.shape
            if not needed <= rows <= batch.lengths[number]:
                problem = f"has routed experts of {rows} tokens"
                reason = f"it has {batch.lengths[number]} tokens, and the last that trains needs those of {needed}"
                raise _unfit(name, problem, reason)
            if shape[1:] != [self._top_k] or (shape[0] != len(self._layers) and shape[0] <= self._layers[-1]):
                problem = f"has routed experts of {' x '.join(map(str, shape))} a token"
                raise _unfit(
                    name, problem, f"the model has {len(self._layers)} layers with experts, {self._top_k} a token"
                )

    def rows(self, batch: Batch, micro: MicroBatch) -> NDArray[np.int16]:
        """[T, layers, k], the engine's choice for each row of a pack, and -1 where it made none.

        Raises:
            TrainerError: TRN110, a sample has an expert that the model has not.
        """
        assert batch.routed_experts is not None
        out = np.full((len(micro.tokens), len(self._layers), self._top_k), NOT_CHOSEN, dtype=np.int16)
        lengths = np.diff(micro.cu_seqlens)
        before = np.where(micro.prefix >= 0, lengths[micro.prefix], 0)
        bounds = zip(micro.samples.tolist(), micro.cu_seqlens[:-1].tolist(), lengths.tolist(), before.tolist())
        for sample, start, length, first in bounds:
            experts = batch.routed_experts[sample]
            if experts is None:
                continue
            values = experts if isinstance(experts, np.ndarray) else read_array(self._segments, experts)
            if values.shape[1] != len(self._layers):  # of dense layers too, as SGLang has it
                values = values[:, self._layers]
            odd = values[((values < 0) | (values >= self._experts)) & (values[..., :1] != NOT_CHOSEN)]
            if len(odd):
                problem = f"has routed expert {odd[0]}"
                raise _unfit(batch.sample_ids[sample], problem, f"a layer of the model has {self._experts} experts")
            rows = values[first : first + length]
            out[start : start + len(rows)] = rows
        return out


def _key(micro: MicroBatch) -> tuple[bytes, bytes]:
    return micro.samples.tobytes(), micro.response.tobytes()


def _unfit(sample: str, problem: str, why: str) -> TrainerError:
    return TrainerError(
        f"sample {sample} {problem}",
        code="TRN110",
        where=f"sample {sample}, train.routing_replay = rollout",
        why=why,
        fix="generate with ctx.generate, or add turns with sample.append_response(..., routed_experts=...)\n"
        "--routing-replay off",
    )
