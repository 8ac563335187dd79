"""The benchmark's grouped products in Triton's interpreter, against float64: runs of no row, of one and of many tiles."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools" / "bench"))

import grouped_triton as grouped


def check():
    torch.manual_seed(0)
    tile = grouped.GroupedTile(16, 32, 16, 4, 2)
    for counts in ([5, 0, 40, 1, 16], [0, 0, 7, 0, 0]):
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        rows, grad = torch.randn(sum(counts), 48), torch.randn(sum(counts), 80)
        weight = torch.randn(5, 90, 48)[:, 5:85]  # at equal distances, and not end to end
        total = torch.randn(5, 90, 48)[:, 5:85]
        parts = list(zip(rows.double().split(counts), grad.double().split(counts), weight.double(), strict=True))
        forward = torch.cat([part @ matrix.T for part, _, matrix in parts])
        backward = torch.cat([part @ matrix for _, part, matrix in parts])
        sums = total.double() + torch.stack([right.T @ left for left, right, _ in parts])
        grouped.add_gradient(total, grad, rows, ends, tile)
        for one, exact in (
            (grouped.rows_product(rows, weight, ends, tile, transposed=True), forward),
            (grouped.rows_product(grad, weight, ends, tile, transposed=False), backward),
            (total, sums),
        ):
            torch.testing.assert_close(one, exact.float(), rtol=1e-5, atol=1e-5)
