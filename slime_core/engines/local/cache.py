"""The key and value cache of every slot and layer; it grows with the longest sequence.

    keys[layer], values[layer]: [slots + 1, kv heads, length, head dim]; the last slot is for scoring and probes
    joint[layer]: both as one tensor [2, slots + 1, ...], where they are of one width

On CPU it is float32 whatever the compute dtype (a bfloat16 key is a float32 key), and its pages are only touched as
sequences grow. The last position of every slot is scratch: rows that stand for no sequence write there, and nothing
ever attends to it.

How long slots are and how many there are is what requests need, within the memory that is there:

    all seats, as long as the longest request may get     where that fits
    all seats, as long as sequences are now               where that fits; longer as they grow
    fewer seats
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_core.errors import EngineError
from slime_core.memory import available_memory

BLOCK = 32
"""Lengths that attention sees are multiples of this many positions. Below 400 multiplications torch's batched product
uses a kernel of its own, with other bits: 32 columns of 13 or more numbers stay above."""

SHARE = 0.5
"""Part of the free memory that the cache may take: the trainer's gradients and optimizer come after it."""

STEP = 4 * BLOCK
"""Slots grow by whole steps, so that prompts of slightly different lengths do not each make them longer."""


def up(count: int, step: int) -> int:
    """``count`` rounded up to a multiple of ``step``."""
    return -(-count // step) * step


def slot_length(context_len: int) -> int:
    """Positions of a slot: whole blocks, and one of scratch."""
    return up(context_len, BLOCK) + 1


@dataclass(slots=True, frozen=True)
class LayerShape:
    """Heads and widths of one layer's cache."""

    kv_heads: int
    key_dim: int
    value_dim: int


def position_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype, device: str) -> int:
    """Bytes of one position of one slot, in all layers."""
    return sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes) * cache_dtype(dtype, device).itemsize


def cache_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What keys and values are kept in."""
    return torch.float32 if device == "cpu" else dtype


def free_memory(device: str, held: int) -> int:
    """Bytes that a cache may take in place of one of ``held`` bytes."""
    if device == "cpu":
        return available_memory() + held
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + cached + held


def fitting(need: int, most: int, *, seats: int, tokens: int, context_len: int, positions: float) -> tuple[int, int]:
    """Seats and tokens of a slot for sequences of ``need`` tokens that may get ``most``.

    ``seats`` is how many are wished for, ``tokens`` what a slot has now, ``positions`` what memory holds in all.
    """
    whole = min(context_len, up(max(need, most), STEP))
    part = min(whole, up(max(need, tokens + tokens // 2), STEP))
    for length in (whole, part, need):
        if (seats + 1) * slot_length(length) <= positions:
            return seats, length
    for length in (part, need):
        fewer = int(positions // slot_length(length)) - 1
        if fewer >= 1:
            return fewer, length
    return 1, need


def check_size(tokens: int, position_bytes: int, memory: int) -> None:
    """One sequence of ``tokens`` and the spare slot fit.

    Raises:
        EngineError: ENG05.
    """
    size = 2 * slot_length(tokens) * position_bytes
    if size > memory:
        raise EngineError(
            f"the KV cache of a sequence of {tokens} tokens needs {size / 2**30:.1f} GiB",
            code="ENG05",
            why=f"{memory / 2**30:.1f} GiB are free",
            fix="lower rollout.rollout_max_context_len or rollout.rollout_max_response_len, or take a smaller model",
        )


class KVCache:
    """Keys and values of ``slots`` sequences and one spare slot."""

    def __init__(
        self, shapes: Sequence[LayerShape], slots: int, context_len: int, dtype: torch.dtype, device: str
    ) -> None:
        self.shapes = list(shapes)
        self.slots = slots
        self.spare = slots
        self.length = slot_length(context_len)
        self.device = device
        self.dtype = cache_dtype(dtype, device)
        self.joint: dict[int, torch.Tensor] = {}  # of layers whose keys and values are of one width
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer, shape in enumerate(shapes):
            self.keys.append(torch.empty(0))
            self.values.append(torch.empty(0))
            self._place(layer, shape)

    @property
    def scratch(self) -> int:
        """The position that stands for no sequence."""
        return self.length - 1

    def grow(self, context_len: int, used: Sequence[int]) -> None:
        """Make slots longer, layer by layer; slot i holds ``used[i]`` positions, the rest is not copied."""
        self.length = slot_length(context_len)
        for layer, shape in enumerate(self.shapes):
            before = self.keys[layer], self.values[layer]
            self._place(layer, shape)
            for old, new in zip(before, (self.keys[layer], self.values[layer]), strict=True):
                for slot, count in enumerate(used):
                    new[slot, :, :count] = old[slot, :, :count]

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Copy positions [begin, end) from one slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, begin:end] = tensor[source, :, begin:end]

    @torch.inference_mode()  # as the cache was allocated
    def clear(self, slot: int) -> None:
        """Forget a slot that may hold numbers that are not finite: a masked NaN would still reach the sum."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()

    def _place(self, layer: int, shape: LayerShape) -> None:
        if shape.key_dim == shape.value_dim:
            self.joint[layer] = self._zeros(2, shape.kv_heads, shape.key_dim)
            self.keys[layer], self.values[layer] = self.joint[layer]
        else:
            self.keys[layer] = self._zeros(1, shape.kv_heads, shape.key_dim)[0]
            self.values[layer] = self._zeros(1, shape.kv_heads, shape.value_dim)[0]

    def _zeros(self, kinds: int, heads: int, dim: int) -> torch.Tensor:
        shape = (kinds, self.slots + 1, heads, self.length, dim)
        if self.device != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        pages = mmap.mmap(-1, 4 * int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # one holds 2 MiB of positions that no sequence may reach
        return torch.from_numpy(np.frombuffer(pages, dtype=np.float32)).view(shape)
