"""A sharded model that learns: its parameters, gradients, AdamW and schedule. The policy and the critic are one each.

gradients over micro-batches -> norm over all ranks -> clip -> AdamW at the schedule's rate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from slime_core.trainers.fsdp.sharding import local
from slime_core.trainers.schedule import Schedule

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.policy import Policy

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only; moments by parameter name, in shards."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    steps: int = 0
    moment1: Tensors = field(default_factory=dict)
    moment2: Tensors = field(default_factory=dict)

    @torch.no_grad()
    def step(self, params: Mapping[str, torch.Tensor], grads: Mapping[str, torch.Tensor], lr: float) -> None:
        """Update ``params`` in place, in one fused pass a group."""
        matrices = [name for name in params if params[name].ndim >= 2]
        others = [name for name in params if params[name].ndim < 2]
        for names, decay in ((matrices, self.weight_decay), (others, 0.0)):
            names = [name for name in names if name in grads and params[name].numel()]
            for name in names:
                if name not in self.moment1:
                    self.moment1[name] = torch.zeros_like(params[name])
                    self.moment2[name] = torch.zeros_like(params[name])
            if not names:
                continue
            device = params[names[0]].device
            adamw(
                [params[name] for name in names],
                [grads[name] for name in names],
                [self.moment1[name] for name in names],
                [self.moment2[name] for name in names],
                [],
                list(torch.full((len(names),), float(self.steps), device=device).unbind()),  # a copy each would wait
                fused=True,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )
        self.steps += 1


@torch.no_grad()
def global_norm(grads: Mapping[str, torch.Tensor], world: int) -> float:
    """Euclidean norm of all gradients over all ranks' shards."""
    if not grads:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(grads.values())))
    total = norms.double().square().sum()
    if world > 1:
        dist.all_reduce(total)
    return float(total.sqrt())


@torch.no_grad()
def clip(grads: Mapping[str, torch.Tensor], norm: float, limit: float) -> None:
    """Scale gradients whose norm exceeds ``limit`` (0 is off) down to it."""
    if limit and norm > limit:
        torch._foreach_mul_(list(grads.values()), limit / norm)


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
