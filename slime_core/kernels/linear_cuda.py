# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`linear.invariant_linear` as a Triton kernel, fed by tensor descriptors; imported on a GPU alone.

One program sums one tile over all inputs, from the first to the last, so nothing depends on how many rows there are.
Tiles of other sizes are used for other counts of rows where they were found to give the bits of ``TILES[0]``, which is
tried once on the device, for each count of inputs, before such a tile is used.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Tensor = torch.Tensor
TRIED_ROWS, TRIED_OUTPUTS = 320, 512
GROUP = 8
"""Tiles of rows whose programs run beside each other, so that they share weights in the cache."""

EDGE = 80
"""What a row or an output of a tile costs beside its products, in products: it is loaded."""


class Tile(NamedTuple):
    """Of a program: rows, outputs, inputs at once; warps and stages of the pipeline."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = (
    Tile(64, 64, 128, 4, 4),
    Tile(64, 32, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
)
SINGLE = Tile(64, 64, 32, 4, 2)
"""For float32, whose products are exact."""


@triton.jit(do_not_specialize=["rows", "outputs"])
def _product(
    x, weight, bias, out, rows, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, inputs] by [outputs, inputs]^T; descriptors read zeros beyond their ends."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(outputs, BLOCK_N)
    first = program // (GROUP_M * column_tiles) * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    within = program % (GROUP_M * column_tiles)
    top = (first + within % height) * BLOCK_M
    left = within // height * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        total = tl.dot(x.load([top, begin]), weight.load([left, begin]).T, total, input_precision=PRECISION)
    row = top + tl.arange(0, BLOCK_M)
    column = left + tl.arange(0, BLOCK_N)
    if BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `linear.invariant_linear`."""
    missing = -x.shape[1] % (16 // x.element_size())  # descriptors take rows of whole 16 bytes; zeros change no sum
    if missing:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    x, weight = _aligned(x), _aligned(weight)
    return _run(_tile(x, weight), x, weight, bias)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _run(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    if rows:
        left, right = (TensorDescriptor.from_tensor(one, [n, tile.inputs]) for one, n in zip((x, weight), tile[:2]))
        _product[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
            left, right, x if bias is None else bias, out, rows, outputs, inputs,
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, GROUP_M=GROUP, BIAS=bias is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _tile(x: Tensor, weight: Tensor) -> Tile:
    """The quickest tile for the size, of those that give the reference's bits."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return SINGLE
    for tile in _by_cost(triton.cdiv(len(x), 64), len(weight), x.device):
        if tile is TILES[0] or _agrees(tile, x.dtype, x.shape[1], x.device):
            return tile
    return TILES[0]


@cache
def _by_cost(row_tiles: int, outputs: int, device: torch.device) -> list[Tile]:
    """Tiles by the time that they should take: rounds over the processors, times what a tile multiplies and loads."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def cost(tile: Tile) -> int:
        tiles = triton.cdiv(64 * row_tiles, tile.rows) * triton.cdiv(outputs, tile.outputs)
        return int(triton.cdiv(tiles, processors)) * (tile.rows * tile.outputs + EDGE * (tile.rows + tile.outputs))

    return sorted(TILES, key=cost)


@cache
def _agrees(tile: Tile, dtype: torch.dtype, inputs: int, device: torch.device) -> bool:
    """Whether the tile has the reference's bits; not to be asked for the first time while a graph is captured."""
    draws = torch.Generator(device).manual_seed(inputs)
    x, weight = (
        torch.randn(count, inputs, generator=draws, device=device, dtype=dtype)
        for count in (TRIED_ROWS, TRIED_OUTPUTS)
    )
    return torch.equal(_run(tile, x, weight, None), _run(TILES[0], x, weight, None))
