"""What attention reads: rows of a batch over a paged cache, and how scores become weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """Rows of S segments, each the newest tokens of a sequence whose keys and values lie in pages.

    Attributes:
        cu_rows: [S + 1] int32; rows of segment s are ``cu_rows[s]`` to ``cu_rows[s + 1]``, rows after the last are
            padding, whose output is unspecified
        lengths: [S] int32, tokens of the sequence with its new rows: the last row is at position ``lengths[s] - 1``
        tables: [S, pages] int32, the sequence's pages in order
        max_rows: bound of the rows of a segment, known to the host; 1 is a decode step
    """

    cu_rows: Tensor
    lengths: Tensor
    tables: Tensor
    max_rows: int


@dataclass(slots=True, frozen=True)
class ScoreForm:
    """How scores become weights: softmax(cap * tanh(scale * q k / cap)) over the last ``window`` keys, where set."""

    scale: float
    window: int
    softcap: float
