"""Float32 masters and their gradients in, updated masters out: AdamW over local shards, and the global norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

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
