"""Dropout whose mask depends on what a token is, and not on where a micro-batch has it.

A mask is a function of (seed of the step, layer, key of the row, column): the same in a recomputed pass, in any
micro-batch, on any rank. A row's key is a checksum of its tokens from the start of its sequence, so rows of a prompt
that several samples share have one mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from slime_core.seeds import seed_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import MicroBatch

Tensor = torch.Tensor
FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers of SplitMix64 (Steele et al. 2014), as int64."""
BITS = 24  # of a draw


class Dropout:
    """Zeros a share of the inputs of adapters and scales the others, where rows are given; else nothing."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.seed = 0  # of the step
        self.rows: Tensor | None = None  # [T] int64, keys of the rows of the pass

    def __call__(self, x: Tensor, layer: int, first: int = 0) -> Tensor:
        """x [..., T, in] in training, with the mask of a layer; itself where no rows are given."""
        if not self.share or self.rows is None:
            return x
        columns = torch.arange(first, first + x.shape[-1], device=x.device) * FACTORS[0]
        seed = seed_of(self.seed, "dropout", layer) - 2**63
        draws = _mixed(_mixed(self.rows + seed)[:, None] + columns) >> (64 - BITS) & ((1 << BITS) - 1)
        keep = draws >= int(self.share * (1 << BITS))
        return x * keep.to(x.dtype).div_(1 - self.share)


def micro_keys(micro: MicroBatch) -> NDArray[np.int64]:
    """A key of each row of a micro-batch, [T]: of its sequence's tokens up to there, a shared prompt's before them."""
    keys = np.empty(len(micro.tokens), dtype=np.int64)
    powers = np.cumprod(np.full(len(keys), FACTORS[1], dtype=np.int64))
    lengths: list[int] = []  # of each segment with its prefix
    for begin, end, prefix in zip(micro.cu_seqlens, micro.cu_seqlens[1:], micro.prefix):
        start = lengths[prefix] if prefix >= 0 else 0
        lengths.append(start + int(end - begin))
        terms = (micro.tokens[begin:end] + 1) * powers[start : lengths[-1]]
        terms[:1] += keys[micro.cu_seqlens[prefix + 1] - 1] if prefix >= 0 else 0
        keys[begin:end] = np.cumsum(terms, dtype=np.int64)
    return keys


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64's last step, in int64."""
    for shift, factor in zip((30, 27), FACTORS[1:]):
        values = (values ^ (values >> shift & ((1 << (64 - shift)) - 1))) * factor
    return values ^ (values >> 31 & ((1 << 33) - 1))
