"""The key and value cache of every slot and layer, allocated once.

    keys[layer], values[layer]: [slots + 1, kv heads, length, head dim]; the last slot is for scoring and probes
    joint[layer]: both as one tensor [2, slots + 1, ...], where they are of one width

On CPU it is float32 whatever the compute dtype (a bfloat16 key is a float32 key), and its pages are only touched as
sequences grow. The last position of every slot is scratch: rows that stand for no sequence write there, and nothing
ever attends to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_core.errors import EngineError

BLOCK = 32
"""Lengths that attention sees are multiples of this many positions. Below 400 multiplications torch's batched product
uses a kernel of its own, with other bits: 32 columns of 13 or more numbers stay above."""

ALIGN = 64


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


class KVCache:
    """Keys and values of ``slots`` sequences and one spare slot.

    Raises:
        EngineError: ENG05, the cache would not fit this machine's memory.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], slots: int, context_len: int, dtype: torch.dtype, device: str
    ) -> None:
        self.shapes = list(shapes)
        self.slots = slots
        self.spare = slots
        self.length = slot_length(context_len)
        self.scratch = self.length - 1
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else dtype
        self._check_size(slots, context_len)
        self.joint: dict[int, torch.Tensor] = {}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer, shape in enumerate(shapes):
            if shape.key_dim == shape.value_dim:
                self.joint[layer] = self._zeros(2, shape.kv_heads, shape.key_dim)
                key, value = self.joint[layer]
            else:
                key = self._zeros(1, shape.kv_heads, shape.key_dim)[0]
                value = self._zeros(1, shape.kv_heads, shape.value_dim)[0]
            self.keys.append(key)
            self.values.append(value)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache (on CPU, of address space: pages are touched as sequences grow)."""
        width = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.shapes)
        return (self.slots + 1) * self.length * width * self.dtype.itemsize

    def _check_size(self, slots: int, context_len: int) -> None:
        if self.device == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            memory = torch.cuda.mem_get_info()[0]
        if self.nbytes > memory:
            raise EngineError(
                f"the KV cache of {slots} slots of {context_len} tokens needs {self.nbytes / 2**30:.1f} GiB",
                code="ENG05",
                why=f"this machine has {memory / 2**30:.1f} GiB",
                fix="set rollout.rollout_max_context_len to what a prompt and its response need, "
                "or lower rollout.rollout_slots",
            )

    def _zeros(self, kinds: int, heads: int, dim: int) -> torch.Tensor:
        shape = (kinds, self.slots + 1, heads, self.length, dim)
        if self.device != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        count = int(np.prod(shape))
        raw = np.zeros(count * 4 + ALIGN, dtype=np.uint8)  # calloc: pages come when they are written
        skip = -raw.ctypes.data % ALIGN
        return torch.from_numpy(raw[skip : skip + count * 4].view(np.float32)).view(shape)

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Copy positions [begin, end) from one slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, begin:end] = tensor[source, :, begin:end]

    def clear(self, slot: int) -> None:
        """Forget a slot that may hold numbers that are not finite: a masked NaN would still reach the sum."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()
