"""Adapters of the layers that `fused` and `fused_cuda` write out: low-rank products of one input side by side.

x --A, of all layers of this input--> z [T, sum of ranks] --B of each--> added to its columns of y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slime_core.algorithms.shared.logprobs import add_product
from slime_core.kernels.linear import adjacent
from slime_core.lora.layers import Adapters, LoraLinear

Tensor = torch.Tensor
Maybe = torch.Tensor | None
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one input."""


class JoinedAdapters:
    """Adapters of layers with one input; those without one have None for A and B.

    Args:
        rows: outputs of each layer, which lie side by side in y
        factors: A [r, in] and B [out, r] of each layer in turn
        scaling: of their product
    """

    def __init__(self, rows: Sequence[int], factors: Sequence[Maybe], scaling: float, dtype: torch.dtype) -> None:
        self.factors, self.scaling = factors, scaling
        self._b: list[tuple[slice, slice, Tensor]] = []  # columns of y and of z, and B
        start = rank = 0
        downs: list[Tensor] = []
        for size, a, b in zip(rows, factors[::2], factors[1::2], strict=True):
            if a is not None and b is not None:
                downs.append(a)
                self._b.append((slice(start, start + size), slice(rank, rank + len(a)), b.to(dtype)))
                rank += len(a)
            start += size
        self._a = (torch.cat(downs) * scaling).to(dtype) if downs else None

    def add(self, y: Tensor, x: Tensor) -> Maybe:
        """Add to ``y`` [T, rows] what adapters make of ``x`` [T, in]; the answer is for :meth:`backward`."""
        if self._a is None:
            return None
        z = x @ self._a.T
        for columns, ranks, b in self._b:
            y[:, columns].addmm_(z[:, ranks], b.T)
        return z

    def backward(self, d_y: Tensor, x: Tensor, z: Maybe, d_x: Tensor, norm: Maybe = None) -> tuple[Maybe, ...]:
        """Add to ``d_x``, the base's gradient of the input; the answer are gradients of the factors.

        Args:
            norm: [in], what ``x`` was multiplied by before it came here
        """
        if self._a is None or z is None:
            return (None,) * len(self.factors)
        d_z = torch.empty_like(z)
        for columns, ranks, b in self._b:
            torch.mm(d_y[:, columns], b, out=d_z[:, ranks])
        d_x.addmm_(d_z, self._a)
        d_a = _product(d_z, x).mul_(self.scaling)
        if norm is not None:
            d_a.mul_(norm)
        grads: list[Maybe] = []
        present = iter(self._b)
        for factor in self.factors[::2]:
            if factor is None:
                grads += [None, None]
                continue
            columns, ranks, _ = next(present)
            grads += [d_a[ranks], _product(d_y[:, columns], z[:, ranks])]
        return tuple(
            grad if grad is None or factor is None else grad.to(factor.dtype)
            for grad, factor in zip(grads, self.factors)
        )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, summed in float32 or what is wider."""
    total = left.new_empty(left.shape[1], right.shape[1], dtype=torch.promote_types(left.dtype, torch.float32))
    add_product(total, left.T, right, fresh=True)
    return total


class LayerAdapters(NamedTuple):
    """The adapters of a layer, by what their input is."""

    qkv: JoinedAdapters
    o: JoinedAdapters
    gate_up: JoinedAdapters
    down: JoinedAdapters

    @classmethod
    def of(cls, weights: Any, factors: Sequence[Maybe], scaling: float, dtype: torch.dtype) -> LayerAdapters:
        """From a layer's `fused.LayerWeights` and its :func:`factors_of`."""
        groups = ((weights.q, weights.k, weights.v), (weights.o,), (weights.gate, weights.up), (weights.down,))
        parts, place = [], 0
        for group in groups:
            stop = place + 2 * len(group)
            parts.append(JoinedAdapters([len(one) for one in group], factors[place:stop], scaling, dtype))
            place = stop
        return cls(*parts)


def factors_of(modules: Sequence[nn.Module]) -> list[Maybe]:
    """A and B of each module's adapter in use, None where it has none."""
    factors: list[Maybe] = []
    for module in modules:
        name = module.adapters.active if isinstance(module, LoraLinear) else None
        factors += (None, None) if name is None else (module.lora_A[name], module.lora_B[name])  # type: ignore[index]
    return factors


def adapters_of(modules: Sequence[nn.Module]) -> Adapters | None:
    """The plain adapters that some of a layer's linear modules have; None where one is another kind of module."""
    if any(type(module) not in (nn.Linear, LoraLinear) for module in modules):
        return None
    adapters = next((module.adapters for module in modules if isinstance(module, LoraLinear)), None)
    return None if adapters is None or adapters.spec.dropout or adapters.spec.use_dora else adapters


@torch.no_grad()
def lay_side_by_side(layer: nn.Module) -> None:
    """Let frozen weights of one input lie one behind another, so that their product needs no copy."""
    for owner in list(layer.modules()):
        for names in GROUPS:
            layers = [one for name in names if isinstance(one := getattr(owner, name, None), nn.Linear)]
            weights = [one.weight for one in layers]
            plain = all(type(weight.data) is torch.Tensor and not weight.requires_grad for weight in weights)
            if len(layers) < 2 or not plain or adjacent([weight.data for weight in weights]):
                continue
            parts = torch.cat([weight.data for weight in weights]).split([len(weight) for weight in weights])
            for weight, part in zip(weights, parts):
                weight.data = part
