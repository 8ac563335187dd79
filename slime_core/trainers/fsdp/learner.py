"""A sharded model that learns: its parameters, gradients, AdamW and schedule. The policy and the critic are one each.

gradients over micro-batches -> norm over all ranks -> clip -> AdamW at the schedule's rate
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers.fsdp.optimizer import AdamW, clip, global_norm
from slime_core.trainers.fsdp.sharding import local
from slime_core.trainers.schedule import Schedule

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.policy import Policy

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Learner:
    """``begin`` gives it a fresh optimizer; a step that is not made advances neither AdamW nor the schedule."""

    module: Policy
    rank: int
    world: int
    optimizer: AdamW = field(default_factory=lambda: AdamW(0.9, 0.98, 1e-8, 0.0))
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=0.0))
    clip_grad: float = 0.0
    _grads: Tensors = field(default_factory=dict)  # of this rank's shards, from `norm` to `forget`

    def begin(self, train: Any, schedule: Schedule) -> None:
        """A fresh optimizer with the [train] section's settings."""
        self.optimizer = AdamW(train.adam_beta1, train.adam_beta2, train.adam_eps, train.weight_decay)
        self.schedule, self.clip_grad = schedule, train.clip_grad

    def parameters(self) -> Tensors:
        """Parameters by their names in a model folder, tied ones once; DTensors."""
        return {name.removeprefix("hf."): p for name, p in self.module.named_parameters()}

    def locals(self) -> Tensors:
        """This rank's shards of the parameters."""
        return {name: local(p.detach()) for name, p in self.parameters().items()}

    def reduce_gradients(self, last: bool) -> None:
        """Before each backward pass: one rank hands gradients to the shards in the last, several in each."""
        module: Any = self.module
        now = last or self.world > 1
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)

    def norm(self) -> float:
        """The Euclidean norm of all ranks' gradients; a collective."""
        self._grads = {n: local(p.grad) for n, p in self.parameters().items() if p.grad is not None}
        return global_norm(self._grads, self.world)

    def update(self, norm: float) -> float:
        """Clip and step, after :meth:`norm`; the answer is the learning rate."""
        clip(self._grads, norm, self.clip_grad)
        rate = self.rate
        self.optimizer.step(self.locals(), self._grads, rate)
        return rate

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.at(self.optimizer.steps)

    def forget(self) -> None:
        """Drop the gradients."""
        self._grads = {}
        self.module.zero_grad()

    def put(self, parameters: Tensors, moment1: Tensors, moment2: Tensors, *, steps: int) -> None:
        """Take the state that ``steps`` optimizer steps made: this rank's shards by parameter name."""
        for name, tensor in self.locals().items():
            tensor.copy_(parameters[name])
        self.optimizer.steps = steps
        self.optimizer.moment1, self.optimizer.moment2 = moment1, moment2

    def states(self) -> list[torch.Tensor]:
        """What AdamW remembers, in shards."""
        return [*self.optimizer.moment1.values(), *self.optimizer.moment2.values()]
