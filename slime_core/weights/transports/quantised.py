"""Sources of an engine in fp8: a linear weight is sent as its scales and its numbers, both computed as it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from slime_core.errors import TrainerError
from slime_core.weights.fp8 import SCALE
from slime_core.weights.transports.buckets import TensorPart, TensorSource

if TYPE_CHECKING:
    from slime_core.weights.fp8 import BlockFormat


def in_fp8(sources: Iterable[TensorSource], block_format: BlockFormat) -> list[TensorSource]:
    """The sources with the scales of each linear weight before its numbers.

    Raises:
        TrainerError: none of them is known as a linear layer.
    """
    quantised = [replace(one, parts=tuple(_parts(one.parts, block_format))) for one in sources]
    if not any(part.dtype for one in quantised for part in one.parts):
        raise no_linear_layers()
    return quantised


def _parts(parts: Iterable[TensorPart], block_format: BlockFormat) -> Iterator[TensorPart]:
    for part in parts:
        if not block_format.covers(part.name):
            yield part
            continue
        shape = block_format.scale_shape(part.shape)
        yield TensorPart(f"{part.name}{SCALE}", shape, partial(_scales, part, block_format), torch.float32)
        yield replace(part, cut=partial(_numbers, part, block_format), dtype=torch.float8_e4m3fn)


def _scales(part: TensorPart, block_format: BlockFormat, whole: torch.Tensor) -> torch.Tensor:
    return block_format.scales(part.cut(whole))


def _numbers(part: TensorPart, block_format: BlockFormat, whole: torch.Tensor) -> torch.Tensor:
    weight = part.cut(whole)
    return block_format.quantise(weight, block_format.scales(weight))


def no_linear_layers() -> TrainerError:
    """No tensor has a name by which a linear layer is known."""
    return TrainerError(
        "this model has no linear layers that are known by name, so nothing of it can be rolled out in fp8",
        where="rollout.rollout_quantization = fp8",
        why="known are tensors model.layers.N...._proj.weight, and experts' w1, w2 and w3",
        fix="--rollout-quantization none",
    )
