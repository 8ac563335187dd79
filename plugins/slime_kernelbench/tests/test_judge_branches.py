"""What a candidate's host code compares sizes with, and the larger sizes that are asked for it."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from slime_kernelbench.judge import beyond
from slime_kernelbench.judge.branches import CHOSEN, COMPARED, Branches, marked
from slime_kernelbench.judge.module import executed
from slime_kernelbench.judge.reference import larger

HOST = """
def grid(n, block=4):
    large = n > 4096
    few = min(n // block, 16)
    assert 0 < n < 1 << 31
    return large, few, "big" >= "a", block <= 8, max(n, 2.5), max(2, *[n])

@triton.jit
def kernel(n):
    return n > 7
"""


def run(*sizes: int) -> tuple[Branches, list[Any]]:
    branches, tree = Branches(), marked(ast.parse(HOST.replace("@triton.jit", "@jit")))
    names: dict[str, Any] = {COMPARED: branches.compared, CHOSEN: branches.chosen, "jit": lambda function: function}
    executed(HOST, "host.py", names, tree)
    answers = []
    for size in sizes:
        branches.call += 1
        answers.append(names["grid"](size))
        names["kernel"](size)
    return branches, answers


def test_a_comparison_that_went_one_way_is_open_while_a_size_may_turn_it() -> None:
    branches, answers = run(8, 32)
    assert answers == [(False, 2, True, True, 8, 8), (False, 8, True, True, 32, 32)]
    assert branches.open() == [[3, 4096, 32], [4, 16, 8]]  # what no size changed, and what is no kernel's
    assert run(8, 8)[0].open() == []
    assert run(8, 100)[0].open() == [[3, 4096, 100]]
    assert run(8, 5000)[0].open() == []


def test_the_size_to_ask_is_beyond_branches_and_numbers_of_the_text() -> None:
    assert beyond.number("a = 3 * 2 ** 12 + n // (1 << 13)", 9000) == 12288
    assert beyond.number("a = 1 << 40, 'text', -20000, True, 1 << (1 << 40)", 30000) == 0
    assert beyond.least(5003, 0, [(1, 300, 17)]) == beyond.MOST
    assert beyond.least(5003, 0, [(1, 1 << 31, 17)]) == 0
    assert beyond.open_branches([[1, 2, 3], [1, 2], "x", [1, 2.0, 3], None]) == [(1, 2, 3)]
    assert beyond.open_branches({"a": 1}) == []


PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x.relu()
def get_inputs():
    return [torch.randn({rows}, {columns})]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("rows", "columns", "shapes"),
    [(512, 4096, ["67x543", "8x4096", "512x9"]), (20, 100, ["8x100", "20x9"])],  # no size is larger than its own
)
def test_larger_sizes_grow_all_together_and_each_alone(rows: int, columns: int, shapes: list[str]) -> None:
    found = larger(PROBLEM.format(rows=rows, columns=columns), 1, 2, 1 << 15)["styles"]
    assert [held["shapes"] for held in found.values()] == shapes
    assert all([case["regime"] for case in held["cases"]] == ["normal"] for held in found.values())
