"""A sharded model that learns: its parameters, gradients, AdamW and schedule. The policy and the critic are one each.

gradients over micro-batches -> norm over all ranks -> clip -> AdamW at the schedule's rate
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import TrainerError
from slime_core.trainers.fsdp import files
from slime_core.trainers.fsdp.optimizer import AdamW, clip, global_norm
from slime_core.trainers.fsdp.schedule import Schedule
from slime_core.trainers.fsdp.sharding import local

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

    def gradients(self) -> tuple[Tensors, float]:
        """This rank's gradients, and the Euclidean norm of all ranks'; a collective."""
        grads = {n: local(p.grad) for n, p in self.parameters().items() if p.grad is not None}
        return grads, global_norm(grads, self.world)

    def update(self, grads: Tensors, norm: float) -> float:
        """Clip and step, and forget the gradients; the answer is the learning rate."""
        clip(grads, norm, self.clip_grad)
        rate = self.rate
        self.optimizer.step(self.locals(), grads, rate)
        self.forget()
        return rate

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.at(self.optimizer.steps)

    def forget(self) -> None:
        """Drop the gradients."""
        self.module.zero_grad()

    def save(self, path: Path, parameters: str, moments: str) -> None:
        """Write parameters and moments as files of these names into ``path``; a collective."""
        mine = self.parameters()
        files.write_shards(path / parameters, self.locals(), mine.__getitem__, self.rank)
        both: Tensors = {}
        if self.optimizer.steps:  # a rank whose part of a parameter is empty has no moments of it, and takes part
            for kind, known in (("moment1", self.optimizer.moment1), ("moment2", self.optimizer.moment2)):
                both |= {
                    f"{kind}.{n}": known[n] if n in known else torch.zeros_like(t) for n, t in self.locals().items()
                }
        files.write_shards(path / moments, both, lambda n: mine[n.partition(".")[2]], self.rank)

    @torch.no_grad()
    def restore(self, path: Path, parameters: str, moments: str, steps: int) -> None:
        """Read what :meth:`save` wrote after ``steps`` optimizer steps.

        Raises:
            TrainerError: a parameter that is not there, or TRN108 of another shape.
        """
        mine = self.parameters()
        both = files.read_shards(path / moments, lambda n: mine[n.partition(".")[2]])
        stored = files.read_shards(path / parameters, mine.__getitem__)
        if missing := sorted(set(mine) - set(stored)):
            raise TrainerError(f"{parameters} lacks {len(missing)} parameters: {missing[:5]}", where=str(path))
        for name, tensor in self.locals().items():
            tensor.copy_(stored[name])
        self.optimizer.steps = steps
        self.optimizer.moment1 = {n[8:]: t for n, t in both.items() if n.startswith("moment1.")}
        self.optimizer.moment2 = {n[8:]: t for n, t in both.items() if n.startswith("moment2.")}

    def to(self, device: torch.device | str, what: set[str]) -> None:
        """Move what ``release`` and ``reacquire`` name: ``parameters``, ``optimizer``."""
        if "optimizer" in what:
            self.optimizer.to(device)
        if "parameters" in what:
            self.module.to(device)
