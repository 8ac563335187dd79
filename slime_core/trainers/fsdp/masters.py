"""The weights of a module that one rank trains in half precision: float32 masters, gradient sums, and their copy.

    masters (float32) --copy--> the module's parameters (compute) --backward--> sums (float32) --AdamW--> masters

A gradient goes to its float32 sum as soon as a backward pass has made it, so none in half precision stays. A module
that computes in float32 needs none of this: its parameters are what learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from slime_core.algorithms.shared.logprobs import add_product
from slime_core.trainers.fsdp.places import DevicePlace

Tensors = dict[str, torch.Tensor]
ALIGNED = 64  # numbers from the start of one copy to that of the next, or a multiple: products want whole lines


class Masters:
    """Masters of a module's parameters by name; those of ``exact`` modules go on computing in the dtype they have.

    Example:
        masters = Masters(model, torch.bfloat16)
        loss(model).backward()
        adamw(masters.weights, masters.gradients())
        masters.refresh()
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        exact: Sequence[nn.Module] = (),
        place: DevicePlace | None = None,
    ) -> None:
        exact_ids = {id(parameter) for one in exact for parameter in one.parameters()}
        named = dict(module.named_parameters())
        self.weights: Tensors = {name: parameter.data for name, parameter in named.items()}
        self.sums: Tensors = {}  # gradients of the copies since `forget`
        self._totals: dict[tuple[int, ...], torch.Tensor] = {}  # of several weights, whose sums are views of it
        self.copies = {name: p for name, p in named.items() if id(p) not in exact_ids}
        self._exact = {name: p for name, p in named.items() if id(p) in exact_ids}
        self._names = {id(parameter): name for name, parameter in self.copies.items()}
        ordered = sorted(self.copies.items(), key=lambda item: item[1].ndim < 2)  # matrices of a layer side by side
        sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for _, parameter in ordered]
        storage = torch.empty(sum(sizes), dtype=dtype, device=next(iter(named.values())).device)
        for (name, parameter), part in zip(ordered, storage.split(sizes)):
            parameter.data = part[: parameter.numel()].view(parameter.shape).copy_(parameter.data)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))
        masters = {name: self.weights[name] for name in self.copies}
        self.weights |= (place or DevicePlace()).keep(masters)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # it is in its sum already
            return
        if name in self.sums:
            self.sums[name].add_(grad)
        else:
            self.sums[name] = grad.float()

    def add_product(self, parameters: Sequence[torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> bool:
        """Add the gradients of the weights of linear layers with one input, left^T right, in float32.

        Args:
            parameters: the layers' weights; nothing is added, and the answer is False, where one is not a copy or has
                a gradient that came another way
            left: [T, rows of all weights], gradients of their outputs
            right: [T, in], the input
        """
        key = tuple(map(id, parameters))
        total = self._totals.get(key)
        fresh = total is None
        if total is None:
            names = [self._names.get(one, "") for one in key]
            if any(not name or name in self.sums for name in names):
                return False
            rows = [len(parameter) for parameter in parameters]
            total = self._totals[key] = right.new_empty(sum(rows), right.shape[1], dtype=torch.float32)
            self.sums.update(zip(names, total.split(rows)))
        add_product(total, left.T, right, fresh=fresh)
        return True

    def gradients(self) -> Tensors:
        """Float32 gradients since `forget`, of the parameters that have one."""
        grads = self.sums | {name: p.grad for name, p in self._exact.items() if p.grad is not None}
        return {name: grads[name] for name in self.weights if name in grads}  # backward passes have another order

    def forget(self) -> None:
        """Drop the gradients."""
        self.sums, self._totals = {}, {}
        for parameter in self._exact.values():
            parameter.grad = None

    @torch.no_grad()
    def refresh(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Have the module compute with the masters as they are now, or with these ``weights``."""
        values = self.weights if weights is None else weights
        for name, copy in self.copies.items():  # on its own device, where masters of the host are rounded too
            copy.copy_(values[name].to(copy.device, non_blocking=True))
