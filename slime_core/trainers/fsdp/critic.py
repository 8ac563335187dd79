"""The critic of PPO: a value model that learns beside the policy, in the same optimizer steps and from the same packs.

Parameters and moments are saved as `critic.safetensors` and `critic_moments.safetensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers import critic
from slime_core.trainers.fsdp.learner import Learner
from slime_core.trainers.fsdp.policy import on_device
from slime_core.trainers.fsdp.sharding import shard
from slime_core.trainers.fsdp.values import ValueModel, build_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slime_core.trainers.share import Sums
    from slime_core.types import MicroBatch
    from slime_core.weights.folder import ModelFolder


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
        self.model.choose_compiling(train.compile)
        shard(self.model, mesh, dtype, exact=(self.model.score,))
        self.learner = Learner(self.model, policy.rank, policy.world)
        if not self.path:
            mine, theirs = self.learner.locals(), policy.locals()
            for name in mine.keys() & theirs.keys():
                mine[name].copy_(theirs[name])

    def begin(self, train: Any, optimizer_steps: int) -> None:
        """A stage: a fresh optimizer; warms up to ``critic_lr`` and decays as the policy's rate does."""
        self.value_clip = float(train.value_clip)
        self.model.choose_recomputing(train)
        self.learner.begin(train, critic.schedule(train, optimizer_steps))

    def backward(self, micros: list[MicroBatch], sums: Sums) -> None:
        """Add one optimizer step's gradients, and its sums: ``loss``, and per-token metrics by weight."""
        for number, micro in enumerate(micros):
            self.learner.reduce_gradients(number + 1 == len(micros))
            critic.share(self.values(micro), micro, self.value_clip, sums).backward()

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Of the position that predicts each response token, so before it is seen; [R]."""
        predict = torch.from_numpy(micro.predict).to(self.device, non_blocking=True)
        values: torch.Tensor = self.model(*on_device(micro, self.device), predict)
        return values
