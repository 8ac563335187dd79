"""The critic of PPO: a value model that learns beside the policy, in the same optimizer steps and from the same packs.

score -> ``values`` [R] -> estimator -> ``returns`` [R] -> value loss at the policy's token weights -> its own AdamW

Parameters and moments are saved as `critic.safetensors` and `critic_moments.safetensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.errors import TrainerError
from slime_core.trainers import checks
from slime_core.trainers.fsdp.learner import Learner
from slime_core.trainers.fsdp.passes import on_device
from slime_core.trainers.fsdp.sharding import reshard, shard
from slime_core.trainers.fsdp.values import ValueModel, build_values
from slime_core.trainers.schedule import Schedule
from slime_core.trainers.share import Sums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.folder import ModelFolder

READS = ("values", "returns")  # columns of the value loss


class Critic:
    """A sharded value model with its optimizer. ``path`` is ``train.critic_load``; empty copies the policy."""

    def __init__(
        self,
        train: Any,
        policy: Learner,
        folder: ModelFolder,
        mesh: DeviceMesh,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.path = str(train.critic_load)
        self.device = device
        self.model: ValueModel = build_values(self.path, folder, seed, device, train.logprob_chunk_tokens)
        shard(self.model, mesh, dtype, exact=(self.model.score,))
        self.learner = Learner(self.model, policy.rank, policy.world)
        if not self.path:
            mine, theirs = self.learner.locals(), policy.locals()
            for name in mine.keys() & theirs.keys():
                mine[name].copy_(theirs[name])

    def begin(self, train: Any, optimizer_steps: int) -> None:
        """A stage: a fresh optimizer; warms up to ``critic_lr`` and decays as the policy's rate does."""
        self.value_clip = float(train.value_clip)
        self.model.recompute = train.gradient_checkpointing
        schedule = Schedule(
            peak=train.critic_lr,
            low=min(train.min_lr, train.critic_lr),
            style=train.lr_decay_style,
            warmup=train.critic_lr_warmup_iters,
            decay=train.lr_decay_iters or optimizer_steps,
        )
        self.learner.begin(train, schedule)

    def score(self, batch: Batch, micros: list[MicroBatch]) -> Columns:
        """``values`` [R] float32: of the position that predicts each response token, so before it is seen.

        Raises:
            TrainerError: TRN95 a value that is not finite.
        """
        column = torch.zeros(len(batch.loss_mask), dtype=torch.float32, device=self.device)
        for micro in micros:
            column[torch.from_numpy(micro.response).to(self.device)] = self._values(micro)
        reshard(self.model)
        if self.learner.world > 1:
            dist.all_reduce(column)
        values = column.cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            sample = checks.sample_at(batch, int(bad[0]))
            raise TrainerError(
                f"a value of sample {sample} is {values[bad[0]]}",
                code="TRN95",
                where=f"sample {sample}",
                why="the critic's weights are not finite",
                fix="lower train.critic_lr",
            )
        return {"values": values}

    def check(self, batch: Batch) -> None:
        """Refuse a batch that the value loss cannot read.

        Raises:
            TrainerError: a column is missing.
        """
        if missing := [name for name in READS if name not in batch.columns]:
            raise TrainerError(
                f"the batch has no column {missing[0]}, which the critic learns from",
                why=f"it has {sorted(batch.columns)}; an estimator that reads values gives returns",
            )

    def backward(self, micros: list[MicroBatch], sums: Sums) -> None:
        """Add one optimizer step's gradients, and its sums: ``loss``, and per-token metrics by weight."""
        from slime_core.algo.losses import value_loss

        for number, micro in enumerate(micros):
            self.learner.reduce_gradients(number + 1 == len(micros))
            weight = torch.from_numpy(micro.weight).to(self.device)
            old, returns = (torch.from_numpy(micro.columns[name]).to(self.device) for name in READS)
            losses, metrics = value_loss(self._values(micro), old, returns, self.value_clip, weight)
            counts = weight > 0
            total = torch.where(counts, losses * weight, 0).sum()
            total.backward()
            if not torch.isfinite(total.detach()):
                sums.blame(losses.detach(), counts, micro.response, micro.samples)
            seen = {name: torch.where(counts, v.detach() * weight, 0).sum() for name, v in metrics.items()}
            sums.add({"loss": total.detach(), **seen})

    def _values(self, micro: MicroBatch) -> torch.Tensor:
        predict = torch.from_numpy(micro.predict).to(self.device, non_blocking=True)
        values: torch.Tensor = self.model(*on_device(micro, self.device), predict)
        return values


def explained_variance(batch: Batch) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over the step's trainable tokens, before the step, in float64.

    1 is a perfect critic, 0 one that knows the mean, below 0 worse. Left out where returns do not vary.
    """
    trained = batch.loss_mask > 0
    if not trained.any():
        return {}
    values, returns = (np.asarray(batch.columns[name], dtype=np.float64)[trained] for name in READS)
    spread = float(np.mean((returns - returns.mean()) ** 2))
    if spread == 0 or not np.isfinite(spread):
        return {}
    error = returns - values
    return {"explained_variance": 1.0 - float(np.mean((error - error.mean()) ** 2)) / spread}
