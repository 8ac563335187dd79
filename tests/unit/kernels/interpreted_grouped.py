"""Grouped gradients and a mixture of experts in Triton's interpreter, against float64: runs of no row, of one and of many tiles."""

import torch
import torch.nn.functional as F

from slime_core.kernels import grouped_cuda
from slime_core.kernels.grouped import grouped_experts

TILE = grouped_cuda.GroupedTile(16, 32, 16, 4, 2)


def check():
    torch.manual_seed(0)
    for counts in ([5, 0, 40, 1, 16], [0, 0, 7, 0, 0]):
        compare(counts)
    compare_experts()


def compare(counts):
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, grad = torch.randn(sum(counts), 48), torch.randn(sum(counts), 80)
    total = torch.randn(5, 90, 48)[:, 5:85]  # at equal distances, and not end to end
    parts = zip(rows.double().split(counts), grad.double().split(counts), strict=True)
    exact = total.double() + torch.stack([right.T @ left for left, right in parts])
    grouped_cuda.add_gradient(total, grad, rows, ends, TILE)
    torch.testing.assert_close(total, exact.float(), rtol=1e-5, atol=1e-5)


def compare_experts():
    """A mixture's output and gradients against a loop over tokens in float64; one expert has no row."""
    shapes = {"x": (7, 32), "weights": (7, 2), "gate_up": (4, 48, 32), "down": (4, 32, 24)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    index = torch.tensor([[0, 2], [2, 0], [3, 2], [2, 3], [0, 3], [3, 0], [2, 0]])
    back, results = torch.randn(7, 32), []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
        out = grouped_experts(index=index, **leaves) if dtype == torch.float32 else one_by_one(index=index, **leaves)
        results.append((out, *torch.autograd.grad(out, list(leaves.values()), back.to(dtype))))
    for one, exact in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=2e-5, atol=2e-5)


def one_by_one(x, index, weights, gate_up, down):
    sums = []
    for row, experts, shares in zip(x, index, weights, strict=True):
        parts = [(*(gate_up[e] @ row).chunk(2), share, down[e]) for e, share in zip(experts, shares, strict=True)]
        sums.append(sum(matrix @ (F.silu(gate) * up) * share for gate, up, share, matrix in parts))
    return torch.stack(sums)
