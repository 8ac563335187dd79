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

Tensors = dict[str, torch.Tensor]


class Masters:
    """Masters of a module's parameters by name; those of ``exact`` modules go on computing in the dtype they have.

    Example:
        masters = Masters(model, torch.bfloat16)
        loss(model).backward()
        adamw(masters.weights, masters.gradients())
        masters.refresh()
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, exact: Sequence[nn.Module] = ()) -> None:
        exact_ids = {id(parameter) for one in exact for parameter in one.parameters()}
        self.weights: Tensors = {}
        self.sums: Tensors = {}  # gradients of the copies since `forget`
        self.copies: dict[str, nn.Parameter] = {}
        self._exact: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            self.weights[name] = parameter.data
            if id(parameter) in exact_ids:
                self._exact[name] = parameter
                continue
            self.copies[name] = parameter
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if name in self.sums:
            self.sums[name].add_(grad)
        else:
            self.sums[name] = grad.float()

    def gradients(self) -> Tensors:
        """Float32 gradients since `forget`, of the parameters that have one."""
        grads = self.sums | {name: p.grad for name, p in self._exact.items() if p.grad is not None}
        return {name: grads[name] for name in self.weights if name in grads}  # backward passes have another order

    def forget(self) -> None:
        """Drop the gradients."""
        self.sums = {}
        for parameter in self._exact.values():
            parameter.grad = None

    @torch.no_grad()
    def refresh(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Have the module compute with the masters as they are now, or with these ``weights``."""
        values = self.weights if weights is None else weights
        torch._foreach_copy_(list(self.copies.values()), [values[name] for name in self.copies])
