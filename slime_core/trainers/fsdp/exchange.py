"""Attention over sequences whose rows several ranks share: each rank gets some heads of all rows.

    [own rows, all heads] --all to all--> [all rows, own heads] -> attention -> [own rows, all heads]

DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Attention itself is that of one rank, so it is exact for
packs, shared prompts and windows. Where there are fewer key heads than ranks they are repeated, and where query heads
do not divide by the ranks, heads of zeros fill them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives as collectives

Tensor = torch.Tensor


class HeadExchange:
    """The way of one pack's rows to heads and back, of rank ``number`` of ``size``.

    Row i is of rank i // ``lanes`` % ``size``, where its rows of lane i % ``lanes`` stand after those of lower lanes.
    No dataclass, which FSDP would look into.
    """

    def __init__(self, group: Any, size: int, number: int, count: int, lanes: int = 1) -> None:
        self.group, self.size, self.number, self.count, self.lanes = group, size, number, count, lanes

    def heads_of_all_rows(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's heads of all ``count`` rows, of its rows [t, heads, d] with all heads."""
        repeats = self._repeats(q.shape[1], k.shape[1])
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        parts = [self._filled(x).unflatten(1, (self.size, -1)) for x in (q, k, v)]
        rows = self._to_ranks(torch.cat([part.flatten(2) for part in parts], 2).transpose(0, 1))
        flat = rows.unflatten(1, (self.lanes, -1)).permute(2, 0, 1, 3).flatten(0, 2)[: self.count]
        widths = [part.shape[2] * part.shape[3] for part in parts]
        heads = [x.unflatten(1, part.shape[2:]) for x, part in zip(flat.split(widths, 1), parts)]
        return heads[0], heads[1], heads[2]

    def rows_of_all_heads(self, out: Tensor, heads: int) -> Tensor:
        """This rank's rows [t, heads, d] of outputs [count, own heads, d]."""
        filled = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, -self.count % (self.size * self.lanes)))
        rows = filled.unflatten(0, (-1, self.size, self.lanes)).permute(1, 2, 0, 3, 4)
        parts = self._to_ranks(rows.flatten(1, 2))
        rows_of_heads: Tensor = parts.transpose(0, 1).flatten(1, 2)[:, :heads]
        return rows_of_heads

    def own_heads(self, values: Tensor) -> Tensor:
        """This rank's part of one value a query head."""
        parts: Tensor = self._filled(values[None])[0].unflatten(0, (self.size, -1))
        return parts[self.number]

    def _repeats(self, heads: int, kv_heads: int) -> int:
        """How often each key head is there, so that ranks have as many and each query head has its own."""
        group = heads // kv_heads
        return next(n for n in range(1, group + 1) if group % n == 0 and (kv_heads * n % self.size == 0 or n == group))

    def _filled(self, x: Tensor) -> Tensor:
        """[t, heads, ...] with heads of zeros up to a multiple of the ranks."""
        missing = -x.shape[1] % self.size
        return torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), 1) if missing else x

    def _to_ranks(self, parts: Tensor) -> Tensor:
        """[size, t, ...], a part for each rank, to the parts from each."""
        if self.size == 1:
            return parts
        sent = parts.contiguous().flatten(0, 1)
        received: Tensor = collectives.all_to_all_single_autograd(sent, None, None, self.group)
        return received.view(parts.shape)
