"""Values of a problem's inputs under the judge's regimes, and which of them are asked."""

from __future__ import annotations

import pytest
import torch

from slime_kernelbench.judge.reference import BOUNDS, REGIMES, examination
from slime_kernelbench.judge.wire import leaves_of

PROBLEM = """
import torch
ROWS, COLS = 64, 2048
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {made}
    def forward(self, x):
        return {formula}
def get_inputs():
    return [torch.randn(ROWS, COLS)]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (
            [[1.0, 2.0], [3.0, -4.0], [1.0, -1.0], [5.0, 0.0]],
            [[40.0, 80.0], [120.0, -160.0], [24.0, -24.0], [120.0, 0.0]],
        ),
        ([0.5, 0.25, 0.125], [60.0, 30.0, 3.0]),
        ([10.0, 1.0], [240.0, 24.0]),
        ([-1.0, -2.0, 3.0, 4.0], [-120.0, -240.0, 72.0, 96.0]),
    ],
    ids=["rows", "below one", "large as they are", "negative"],
)
def test_large_values_overflow_an_exponential_in_one_half(value: list[float], want: list[float]) -> None:
    large = REGIMES["large"](torch.tensor(value), torch.Generator())
    assert torch.allclose(large, torch.tensor(want))


def asked(formula: str, made: str = "pass", swap: bool = False) -> dict[str, tuple[set[str], list[tuple[int, ...]]]]:
    """Regimes and shapes by style."""
    text = PROBLEM.format(formula=formula, made=made)
    text = text.replace("ROWS, COLS = 64, 2048", "ROWS, COLS = 2048, 64") if swap else text
    found = examination(text, 3, 4, ["even", "odd", "long"])
    return {
        name: (
            {case["regime"] for case in held["cases"]},
            [leaf.shape for leaf in leaves_of(held["cases"][0]["inputs"])],
        )
        for name, held in found["styles"].items()
    }


def test_values_that_the_reference_itself_has_no_number_for_are_not_asked() -> None:
    assert "large" in asked("torch.softmax(x, dim=1)")["odd"][0]
    assert "large" not in asked("torch.exp(x)")["odd"][0]


def test_rows_are_as_long_as_on_a_gpu_where_no_weights_are() -> None:
    assert asked("torch.softmax(x, dim=1)")["long"][1] == [(1, 5003)]
    weighed = asked("self.linear(x[:, :64])", "self.linear = torch.nn.Linear(64, 64)")
    assert 1 not in weighed["long"][1][0]
    many = asked("torch.softmax(x, dim=1)", swap=True)  # rows are many, and not long
    assert 1 not in many["long"][1][0]


@pytest.mark.parametrize(
    "attention",
    ["torch.softmax(x @ x.T, dim=1) @ x", "torch.nn.functional.scaled_dot_product_attention(x, x, value=x)"],
)
def test_a_long_case_is_no_longer_than_a_kernel_of_small_blocks_has_time_for(attention: str) -> None:
    (rows, _), *_ = asked(attention, swap=True)["long"][1]
    assert 100**2 < rows * rows <= 8 * BOUNDS["long"][1]  # elements of its scores
