"""AdamW over a rank's shards, and the norm and the clip of all gradients."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from slime_core.trainers.fsdp.places import DevicePlace, Named, Tensors


@dataclass(slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only; moments by parameter name, in shards."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    place: DevicePlace = field(default_factory=DevicePlace)
    steps: int = 0
    moment1: Tensors = field(default_factory=dict)
    moment2: Tensors = field(default_factory=dict)

    @torch.no_grad()
    def step(self, params: Named, grads: Named, lr: float, scale: float = 1.0, copies: Named | None = None) -> None:
        """Update ``params`` in place by gradients times ``scale``, in one fused pass a window.

        Args:
            copies: parameters that a model computes with, by the same names, where they are not ``params``
        """
        learning = [name for name in params if name in grads and params[name].numel()]
        fresh = {name: params[name] for name in learning if name not in self.moment1}
        self.moment1 |= self.place.zeros_like(fresh)
        self.moment2 |= self.place.zeros_like(fresh)
        for matrices, decay in ((True, self.weight_decay), (False, 0.0)):
            names = [name for name in learning if (params[name].ndim >= 2) == matrices]
            for part, tensors in self.place.windows(names, (params, self.moment1, self.moment2), (grads,)):
                self._step(tensors, lr, scale, decay)
                for name, tensor in zip(part, tensors[0]):
                    if copies is not None and name in copies:
                        copies[name].copy_(tensor)
        self.steps += 1

    def states(self) -> dict[str, Tensors]:
        """What it remembers, by kind and parameter name."""
        return {"moment1": self.moment1, "moment2": self.moment2}

    def moment_dtype(self, shard: torch.Tensor) -> torch.dtype:
        """Of both moments of a parameter's shard."""
        return torch.float32

    def scale_shape(self, shard: torch.Tensor) -> tuple[int, ...]:
        """Of the scales of a moment of a parameter's shard; empty where it has none."""
        return ()

    def state_bytes(self, shard: torch.Tensor) -> int:
        """Of all that it remembers of a parameter's shard."""
        scales = 4 * sum(self.scale_shape(shard))
        return 2 * (shard.numel() * self.moment_dtype(shard).itemsize + scales)

    def _step(self, tensors: list[list[torch.Tensor]], lr: float, scale: float, decay: float) -> None:
        """One window's: parameters, both moments, gradients."""
        params, moment1, moment2, grads = tensors
        if scale != 1:
            torch._foreach_mul_(grads, scale)
        steps = torch.full((len(params),), float(self.steps), device=params[0].device)
        adamw(
            params,
            grads,
            moment1,
            moment2,
            [],
            list(steps.unbind()),  # a copy each would wait
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )


@torch.no_grad()
def global_norm(grads: Named, world: int, place: DevicePlace, copies: Container[str] = ()) -> float:
    """Euclidean norm of all gradients over all ranks' shards; ``copies`` are counted on another rank."""
    if not grads:
        return 0.0
    norms = dict[str, torch.Tensor]()
    for names, (part,) in place.windows(list(grads), (), (grads,)):
        norms.update(zip(names, torch._foreach_norm(part)))
    counted = torch.tensor([name not in copies for name in norms], dtype=torch.float64)
    squares = torch.stack(list(norms.values())).double().square()
    total = (squares * counted.to(squares.device, non_blocking=True)).sum()
    if world > 1:
        dist.all_reduce(total)
    return float(total.sqrt())


def clip_scale(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by, so that it is at most ``limit`` (0 is off)."""
    return limit / norm if limit and norm > limit else 1.0
