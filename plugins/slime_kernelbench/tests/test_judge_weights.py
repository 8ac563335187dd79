"""The reference's weights reach a candidate by name, by order or by size; what found no place is told."""

from __future__ import annotations

import torch
from torch import nn

from slime_kernelbench.judge.weights import give

GAMMA, BETA, MATRIX = torch.tensor([0.5, 2.0, 3.0]), torch.tensor([0.1, -0.2, 0.3]), torch.arange(9.0).view(3, 3)
STATE = {"ln.weight": GAMMA, "ln.bias": BETA, "linear.weight": MATRIX}
WOKEN = {"ln.weight": 1.0, "ln.bias": 0.0}


def model(**parameters: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, value in parameters.items():
        made.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
    return made


def held(made: nn.Module) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in made.state_dict().items()}


def test_as_many_of_the_same_shapes_are_taken_in_order() -> None:
    made = model(a=torch.ones(3), b=torch.zeros(3), c=torch.zeros(3, 3))
    assert give(made, STATE, WOKEN) == []
    assert held(made) == {"a": GAMMA.tolist(), "b": BETA.tolist(), "c": MATRIX.flatten().tolist()}


def test_weights_of_another_model_are_matched_by_size_and_value() -> None:
    made = model(shift=torch.zeros(1, 3), both=torch.arange(12.0), gain=torch.ones(3, 1), rest=torch.ones(4))
    assert give(made, STATE, WOKEN) == []
    want = {"shift": BETA.tolist(), "both": list(range(12)), "gain": GAMMA.tolist(), "rest": [1.0] * 4}
    assert {name: torch.tensor(value) for name, value in held(made).items()}.keys() == want.keys()
    assert all(torch.equal(torch.tensor(held(made)[name]), torch.tensor(value)) for name, value in want.items())


def test_a_name_goes_before_a_size() -> None:
    made = nn.Module()
    made.first = nn.Parameter(torch.ones(3), requires_grad=False)
    made.ln = nn.LayerNorm(3)
    made.requires_grad_(False)
    assert give(made, STATE | {"more": MATRIX}, WOKEN) == []
    assert torch.equal(made.ln.weight, GAMMA)
    assert torch.equal(made.first, torch.ones(3))


def test_weights_without_a_place_are_named() -> None:
    assert give(model(a=torch.ones(3)), STATE, WOKEN) == ["ln.bias"]
    assert give(model(a=torch.ones(4), b=torch.zeros(3)), STATE, WOKEN) == ["ln.weight"]
    assert give(model(), STATE, WOKEN) == ["ln.weight", "ln.bias"]
    assert give(model(), {"linear.weight": MATRIX}, {}) == []
