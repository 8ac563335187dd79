"""Where a tensor lies in a safetensors file, and what one of a quantised weight is computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: ``begin`` and ``end`` are bytes from the start of ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    stored: WeightSource | None = None  # of a quantised weight, which has the values' dtype and shape

    def rows(self, first: int, count: int) -> TensorInfo:
        """Where ``count`` rows lie; of a quantised weight ``first`` is the first of those that share a scale."""
        size = (self.end - self.begin) // self.shape[0]
        begin, stored = self.begin + first * size, self.stored
        if stored is not None:
            stored = stored.rows(first, count)
        return replace(self, shape=(count, *self.shape[1:]), begin=begin, end=begin + count * size, stored=stored)


Read = Callable[[TensorInfo], "torch.Tensor"]


class WeightSource(Protocol):
    """What a quantised weight is computed from."""

    @property
    def form(self) -> Any:
        """How it is stored: a `stored_forms.StoredForm`."""

    def rows(self, first: int, count: int) -> WeightSource:
        """As `TensorInfo.rows`."""

    def values(self, read: Read) -> torch.Tensor:
        """The floats."""

    def parts(self, read: Read) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers and scales; None where no row has all its scales."""
