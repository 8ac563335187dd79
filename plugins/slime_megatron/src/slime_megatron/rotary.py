"""Rotary embeddings by position: what megatron-core gives for positions 0, 1, 2, ... dealt to the rows of a pack.

angles of positions --rows of the pack--> cosines and sines, once a pack --`CoreAttention`--> queries and keys, turned
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime_core.trainers.compiling import Compiled

if TYPE_CHECKING:
    from slime_megatron.packing import Pack

STEP = 1024  # tables are made for multiples of it, and kept


class PackRotary(nn.Module):
    """Stands where a megatron-core embedding (rope or yarn) stood; its "length" is the pack itself.

    megatron-core asks an embedding for a length, from what travels with the micro-batch, and then for rows of that
    length. So the rows are right in a recomputation too, when other packs have passed meanwhile.

    Args:
        axes: of each frequency, the axis of positions by which it turns (M-RoPE); empty where positions have one axis
    """

    def __init__(self, inner: Any, axes: Sequence[int] = ()) -> None:
        super().__init__()
        self.inner, self.axes = inner, list(axes)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, pack: Pack) -> Pack:
        """See the class."""
        return pack

    def forward(self, pack: Pack, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles of each row of the pack, [T, 1, d]; with yarn and its magnitude beside."""
        if self.axes:
            return self._by_axes(pack)
        with torch.no_grad():
            rotary = self.inner(-(-pack.longest // STEP) * STEP, packed_seq=True)
        table, *rest = rotary if isinstance(rotary, tuple) else (rotary,)
        rows = table.to(pack.positions.device)[pack.positions]  # type: ignore[union-attr]
        rows = rows.squeeze(1)
        return (rows, *rest) if rest else rows

    @torch.no_grad()
    def _by_axes(self, pack: Pack) -> torch.Tensor:
        assert pack.positions is not None
        positions = pack.positions.expand(3, -1)[self.axes].T.float()
        angles = positions * self.inner.inv_freq.to(positions.device)
        return torch.cat((angles, angles), dim=-1)[:, None]


def axes_of(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """The axis (0 time, 1 height, 2 width) of each frequency of a head, [d / 2].

    Each axis has a section of the head (Qwen2-VL, arXiv:2409.12191, 2.1); interleaved, height and width have every
    third frequency up to three times their number, and time all others (Qwen3-VL).
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return axes


@torch.no_grad()
def turns(angles: torch.Tensor, magnitude: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles, times a magnitude, as megatron-core rounds them."""
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [T, heads, d], the first numbers of each head rotated (RoFormer, arXiv:2104.09864).

    Args:
        cos, sin: [T, 1, r], r <= d
        interleaved: neighbours are a pair, else the same places of both halves
    """
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    width = cos.shape[-1]
    turning = x[..., :width]
    if interleaved:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turning = turning * cos + across * sin
    return turning if width == x.shape[-1] else torch.cat((turning, x[..., width:]), dim=-1)


TURN = Compiled(turn)
"""`turn` in few kernels."""
