"""The vision tower of a model of pictures and text, as transformers builds it: its class, its tensors, a module of it.

A tower keeps the names that transformers gives it, behind ``vision_model.`` in Megatron's model, and every rank that
has it has all of it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEGATRON = "vision_model."
"""Before a tower's names in Megatron's model."""


def tower_on_meta(config: Any) -> Any:
    """The tower of a config, names and shapes alone."""
    from slime_core.weights.build import skeleton

    return skeleton(config).model.visual


def tower_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a tower's tensors, by their names in it."""
    return {name: tuple(tensor.shape) for name, tensor in tower_on_meta(config).state_dict().items()}


def build_tower(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The tower with uninitialised parameters of a dtype, in eval mode."""
    import torch
    from transformers.initialization import no_init_weights

    kind = type(tower_on_meta(config))
    with torch.device(device), no_init_weights():
        return kind._from_config(deepcopy(config.vision_config), dtype=dtype).eval()
