"""Weights made of a base and its adapter in every pass: the slow way, which shares nothing with the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from slime_core.lora.layers import Adapters, LoraExperts

Tensor = torch.Tensor


class EffectiveWeight(nn.Module):
    """W + scaling B A, with DoRA each row as long as its magnitude says; gradients reach A, B and the magnitude."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, magnitude: nn.Parameter | None, adapters: Any) -> None:
        super().__init__()
        self.a, self.b, self.magnitude = a, b, magnitude
        self.scaling, self.transposed = adapters.spec.scaling, False

    def forward(self, weight: Tensor) -> Tensor:
        product = torch.einsum("...or,...ri->...oi", self.b, self.a) * self.scaling
        total: Tensor = weight + (product.mT if self.transposed else product)
        if self.magnitude is None:
            return total
        norm = total.detach().norm(dim=1, keepdim=True)  # a constant, as section 4.3 of DoRA has it
        direction: Tensor = total / norm
        return self.magnitude[:, None] * direction


def put_on(model: nn.Module, adapters: Adapters, adapter: str, values: Mapping[str, Tensor]) -> None:
    """Freeze a plain model of transformers and let it compute with an adapter, in the model's own dtype.

    Its learning parameters are named as those of ``adapters``.

    Args:
        values: whole tensors by those names
    """
    model.requires_grad_(False)
    for name, module in adapters.modules.items():
        target = model.get_submodule(name)
        for key in module.adapted:
            inside = f"{key}." if isinstance(module, LoraExperts) else ""
            base = target.get_parameter(key)
            factors: dict[str, nn.Parameter | None] = {}
            for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
                value = values.get(f"{name}.{kind}.{inside}{adapter}")
                factors[kind] = nn.Parameter(value.to(base.device, base.dtype)) if value is not None else None
                if value is not None:
                    _register(target, kind, f"{inside}{adapter}", factors[kind])
            a, b = factors["lora_A"], factors["lora_B"]
            assert a is not None
            assert b is not None
            weight = EffectiveWeight(a, b, factors["lora_magnitude_vector"], adapters)
            weight.transposed = bool(getattr(module, "is_transposed", False))
            parametrize.register_parametrization(target, key, weight, unsafe=True)


def _register(target: nn.Module, kind: str, path: str, parameter: nn.Parameter | None) -> None:
    """Have the parameter under the name of the layers first, by which it is then known."""
    for part in [kind, *path.split(".")[:-1]]:
        if part not in target._modules:
            target.add_module(part, nn.Module())
        target = target.get_submodule(part)
    target.register_parameter(path.rpartition(".")[2], parameter)
