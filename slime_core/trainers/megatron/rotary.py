"""Rotary embeddings by position: what megatron-core gives for positions 0, 1, 2, ... dealt to the rows of a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from slime_core.trainers.megatron.packing import Pack

STEP = 1024  # tables are made for multiples of it, and kept


class PackRotary(nn.Module):
    """Stands where a megatron-core embedding (rope or yarn) stood; its "length" is the pack itself.

    megatron-core asks an embedding for a length, from what travels with the micro-batch, and then for rows of that
    length. So the rows are right in a recomputation too, when other packs have passed meanwhile.
    """

    def __init__(self, inner: Any, *, middle: bool) -> None:
        """``middle``: rows are [T, 1, 1, d] for queries [T, 1, heads, d], else [T, 1, d] for [T, heads, d]."""
        super().__init__()
        self.inner, self.middle = inner, middle

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, pack: Pack) -> Pack:
        """See the class."""
        return pack

    def forward(self, pack: Pack, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles of each row of the pack; with yarn and its magnitude beside."""
        with torch.no_grad():
            made = self.inner(-(-pack.longest // STEP) * STEP, packed_seq=True)
        table, *rest = made if isinstance(made, tuple) else (made,)
        rows = table.to(pack.positions.device)[pack.positions]  # type: ignore[union-attr]
        rows = rows if self.middle else rows.squeeze(1)
        return (rows, *rest) if rest else rows
