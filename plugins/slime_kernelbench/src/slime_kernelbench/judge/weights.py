"""The reference's weights into a candidate's model, as far as it has a place for them. Runs inside its process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def give(model: Any, state: dict[str, torch.Tensor], woken: Mapping[str, float]) -> list[str]:
    """Load ``state``, by name or, where there are as many, in order; the names of those that found no place.

    A model that is made otherwise gets those that are ``woken`` alone (with what their elements were before): under
    its own name, or where it has as many elements, all of that number. Its other weights are what its seed made them.

    Example:
        give(model, {"ln.weight": gamma, "ln.bias": beta}, {"ln.weight": 1.0, "ln.bias": 0.0})      # ["ln.bias"]
    """
    weights: dict[str, torch.Tensor] = model.state_dict()
    if weights.keys() != state.keys() and len(weights) == len(state):
        named = dict(zip(weights, state.values()))
    else:
        named = state
    if weights.keys() == named.keys() and all(weights[name].shape == named[name].shape for name in weights):
        model.load_state_dict(named)
        return []
    return _placed(weights, state, woken)


def _placed(
    weights: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor], woken: Mapping[str, float]
) -> list[str]:
    free = {
        name: value for name, value in weights.items() if value.is_floating_point() and value.unique().numel() == 1
    }
    without: list[str] = []
    for name, before in woken.items():
        value = state[name]
        places = [name] * (name in free) + list(free)
        place = next((one for one in places if _fits(free[one], value, before)), None)
        if place is None:
            without.append(name)
        else:
            free.pop(place).copy_(value.view(weights[place].shape))
    return without


def _fits(place: torch.Tensor, value: torch.Tensor, before: float) -> bool:
    return place.numel() == value.numel() and float(place.flatten()[0]) == before
