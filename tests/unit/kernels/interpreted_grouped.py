"""Grouped products in Triton's interpreter, against float64: runs of no row, of one and of many tiles."""

import torch

from slime_core.kernels import grouped_cuda as grouped

TILES = (grouped.GroupedTile(16, 32, 16, 4, 2), grouped.GroupedTile(16, 32, 16, 4, 2, persistent=True))


def check():
    torch.manual_seed(0)
    for tile in TILES:
        for counts in ([5, 0, 40, 1, 16], [0, 0, 7, 0, 0]):
            compare(tile, counts)


def compare(tile, counts):
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, grad = torch.randn(sum(counts), 48), torch.randn(sum(counts), 80)
    weight = torch.randn(5, 90, 48)[:, 5:85]  # at equal distances, and not end to end
    total = torch.randn(5, 90, 48)[:, 5:85]
    parts = list(zip(rows.double().split(counts), grad.double().split(counts), weight.double(), strict=True))
    forward = torch.cat([part @ matrix.T for part, _, matrix in parts])
    backward = torch.cat([part @ matrix for _, part, matrix in parts])
    exact = torch.stack([right.T @ left for left, right, _ in parts])
    sums, written = total.double() + exact, torch.full((5, 80, 48), torch.nan)
    tiles = grouped.listed_tiles(ends, len(rows), tile.rows)
    grouped.gradient(grad, rows, ends, total, tile, add=True)
    grouped.gradient(grad, rows, ends, written, tile, add=False)
    for one, right in (
        (grouped.rows_product(rows, weight, tiles, tile, transposed=True), forward),
        (grouped.rows_product(grad, weight, tiles, tile, transposed=False), backward),
        (total, sums),
        (written, exact),
    ):
        torch.testing.assert_close(one, right.float(), rtol=1e-5, atol=1e-5)
