"""What a call puts in a model's attributes is gone in the next; an answer among it is told."""

from __future__ import annotations

import torch
from torch import nn

from slime_kernelbench.judge.attributes import Attributes


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inner = nn.Linear(2, 2)
        self.before = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.inner.more = {"answer": [x * self.calls]}
        self.extra = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(2))
        return x


def test_attributes_are_as_they_were_before_the_call() -> None:
    model, x = Keeping(), torch.ones(2)
    names, inner = set(vars(model)), set(vars(model.inner))
    for _ in range(2):
        before = Attributes(model)
        assert before.restore(model(x)) == []
    assert (model.calls, set(vars(model)), set(vars(model.inner))) == (0, names, inner)
    assert set(model.state_dict()) == {"inner.weight", "inner.bias"}


def test_an_answer_that_is_kept_is_told_wherever_it_is() -> None:
    model, x = Keeping(), torch.ones(2)
    before = Attributes(model)
    model(x)
    assert before.restore((x, model.inner.more["answer"][0][:1])) == ["more"]
    before = Attributes(model)
    model.first, model.second = x, None
    assert before.restore(x.view(1, 2)) == ["first"]


def test_attributes_of_before_are_no_change_and_models_may_be_anything() -> None:
    model = Keeping()
    assert Attributes(model).restore(model.before) == []
    assert Attributes(len).restore(torch.ones(1)) == []
