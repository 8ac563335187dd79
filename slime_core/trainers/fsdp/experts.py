"""Layers of experts in transformers' models: their products, the load of experts, and the biases of their routers.

transformers stacks a layer's experts, [E, 2 f, h] and [E, h, f], and multiplies them in one grouped product; what a
router has chosen reaches them as the second argument, [T, k].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from slime_core.kernels.grouped import grouped_experts
from slime_core.trainers.expert_load import ExpertLoad
from slime_core.weights.transports.buckets import ROUTER_BIAS

IMPLEMENTATION = "slime_grouped"  # the name of our products in transformers


def register() -> None:
    """Make our products known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def use_kernels(hf: Any) -> None:
    """Let the model's experts be multiplied by `kernels.grouped`, where they are what that computes."""
    if getattr(hf.config, "_experts_implementation", None) == "grouped_mm":
        register()
        hf.set_experts_implementation(IMPLEMENTATION)


def _experts(experts: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of gated experts with SiLU and without biases by our kernels, of others by transformers' grouped products."""
    plain = experts.has_gate and not experts.has_bias and not experts.is_transposed
    silu = isinstance(getattr(experts, "act_fn", None), nn.SiLU | type(ACT2FN["silu"]))
    if not (plain and silu and type(experts)._apply_gate.__module__ == ALL_EXPERTS_FUNCTIONS.__module__):
        result: torch.Tensor = grouped_mm_experts_forward(experts, x, index, weights)
        return result
    return grouped_experts(x, index, weights, experts.gate_up_proj, experts.down_proj)


def router_biases(hf: nn.Module) -> dict[str, torch.Tensor]:
    """Biases in the choice of experts by name in the model folder, [E] float32; buffers, which no gradient reaches."""
    return {name: buffer for name, buffer in hf.named_buffers() if name.endswith(f".{ROUTER_BIAS}")}


def watch(hf: nn.Module) -> ExpertLoad:
    """Have every layer of experts count its rows by expert."""
    named = [(name, module) for name, module in hf.named_modules() if _are_experts(module)]
    if not named:
        return ExpertLoad()
    biases = router_biases(hf)
    by_layer = {
        layer: bias
        for layer, (name, _) in enumerate(named)
        for key, bias in biases.items()
        if key.startswith(f"{name.rpartition('.')[0]}.")
    }
    experts = [module for _, module in named]
    load = ExpertLoad(len(experts), experts[0].num_experts, next(hf.parameters()).device, by_layer)
    for layer, module in enumerate(experts):
        _count(load, layer, module)
    return load


def _are_experts(module: Any) -> bool:
    """Whether transformers dispatches the module's products (`use_experts_implementation`)."""
    return hasattr(module, "num_experts") and hasattr(module, "is_transposed")


def _count(load: ExpertLoad, layer: int, experts: nn.Module) -> None:
    add = torch.compiler.disable(
        load.add
    )  # a layer that is made again has the same compiled parts, and counts nothing

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        add(layer, args[1])

    experts.register_forward_pre_hook(hook)
