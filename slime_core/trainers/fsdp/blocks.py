"""A model's text part, and the repeated blocks of it and of a tower: what is sharded and recomputed one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from slime_core.media.features import text_model, tower
from slime_core.media.positions import MediaLayout


def text_of(hf: Any) -> Any:
    """The module from embeddings to last hidden states."""
    return hf.base_model if MediaLayout.of(hf.config) is None else text_model(hf)


def layers(hf: Any) -> list[nn.Module]:
    """The text model's repeated blocks."""
    text = text_of(hf)
    names = set(getattr(text, "_no_split_modules", None) or getattr(hf, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in text.modules():
        if type(module).__name__ in names and module not in inside:
            layers.append(module)
            inside.update(module.modules())  # a block inside a block belongs to it
    return layers or [m for module in text.modules() if isinstance(module, nn.ModuleList) for m in module]


def tower_layers(hf: Any) -> list[nn.Module]:
    """Blocks of a vision model's tower, one by one."""
    if MediaLayout.of(hf.config) is None:
        return []
    lists = [module for part in tower(hf) for module in part.modules() if isinstance(module, nn.ModuleList)]
    return [layer for one in lists for layer in one]
