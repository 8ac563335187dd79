"""Frozen weights in 4 or 8 bits that compute as the floats they stand for, which nothing keeps.

    nf4   two numbers a byte, the first in its high bits: indices into 16 quantiles of a normal distribution, times the
          largest absolute value of their block of 64 (QLoRA, arXiv 2305.14314); bitsandbytes' numbers. Of weights
          in bfloat16 that value is one too, so a scale takes 2 bytes: nearly all that QLoRA's double quantisation
          saves, and nothing is rounded a second time
    fp8   float8 e4m3 times the scale of a block of 128 x 128 (`weights.fp8`)

Blocks lie within a row, and a row has all its scales, so that ranks can share a weight by its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from slime_core.kernels import by_triton
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.nf4 import NF4

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(slots=True, frozen=True)
class NumberForm:
    """How a weight is stored."""

    name: str
    block: int  # numbers of a row that share a scale
    per_byte: int  # numbers


AT_ONCE, AT_ONCE_ON_CPU = 1 << 22, 1 << 20  # numbers that are rounded at a time, which takes some ten bytes of each
FORMS = {"nf4": NumberForm("nf4", 64, 2), "fp8": NumberForm("fp8", 128, 1)}


class QuantisedWeight(torch.Tensor):
    """A weight [..., rows, columns] that products read as floats of its dtype; no gradient reaches it.

    A transposed one stays quantised, and so do slices of its first axis and copies on other devices: what a backward
    pass keeps is no float. Every other operation gets the floats.

    Example:
        weight = QuantisedWeight.of(torch.randn(256, 128), "nf4", torch.bfloat16)
        y = torch.nn.functional.linear(x, weight)
    """

    numbers: Tensor  # uint8 [..., rows, columns / numbers a byte]
    scales: Tensor  # [..., rows, columns / block], float32, or shorter where that loses nothing
    form: NumberForm
    transposed: bool  # of its last two axes
    padded: int  # of a rank's rows: so many as each rank sends the others; 0 is all

    @staticmethod
    def __new__(
        cls, numbers: Tensor, scales: Tensor, form: NumberForm, dtype: torch.dtype, *, transposed: bool = False
    ) -> QuantisedWeight:
        shape = [*numbers.shape[:-1], numbers.shape[-1] * form.per_byte]
        if transposed:
            shape[-2:] = shape[-1], shape[-2]
        weight: QuantisedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=numbers.device)
        return weight

    def __init__(
        self, numbers: Tensor, scales: Tensor, form: NumberForm, dtype: torch.dtype, *, transposed: bool = False
    ) -> None:
        self.numbers, self.scales, self.form, self.transposed = numbers, scales, form, transposed
        self.padded = 0

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, form: str, dtype: torch.dtype) -> QuantisedWeight:
        """Round a float weight [..., rows, columns] whose columns are whole blocks; it computes in ``dtype``."""
        rounded, (*lead, rows, columns) = _nf4 if form == "nf4" else _fp8, weight.shape
        flat, height = weight.detach().reshape(-1, columns), BlockFormat().height
        matrices = (flat,) if form == "nf4" else flat.split(rows)  # blocks of nf4 lie within rows
        some = max(1, (AT_ONCE if weight.is_cuda else AT_ONCE_ON_CPU) // (columns * height)) * height
        parts = [rounded(one.float()) for matrix in matrices for one in matrix.split(some)]
        numbers, scales = (torch.cat(of_rows).view(*lead, rows, -1) for of_rows in zip(*parts))
        return cls(numbers, _shortest(scales, dtype), FORMS[form], dtype)

    @classmethod
    def of_blocks(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantisedWeight:
        """From a weight [rows, columns] that `weights.fp8` has stored, float8 and a scale for each block."""
        return cls(numbers.view(torch.uint8), _by_row(scales.float(), len(numbers)), FORMS["fp8"], dtype)

    @classmethod
    def of_packed(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantisedWeight:
        """From a weight in nf4 that is stored already, with blocks of any size within its rows."""
        block = 2 * numbers.shape[-1] // scales.shape[-1]
        return cls(numbers, _shortest(scales, dtype), NumberForm("nf4", block, 2), dtype)

    def write(self, out: Tensor) -> None:
        """Put the floats of a weight that is not transposed where they are wanted, without gaps."""
        dequantise(self.numbers, self.scales, self.form, out.dtype, out)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The floats: products in float32, rounded to ``dtype``, by default the weight's own."""
        values = dequantise(self.numbers, self.scales, self.form, dtype or self.dtype)
        return values.transpose(-2, -1) if self.transposed else values

    @property
    def stored_bytes(self) -> int:
        """Of its numbers and scales."""
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, Tensor]:
        return self.numbers, self.scales

    def _with(self, numbers: Tensor, scales: Tensor, *, transposed: bool | None = None) -> QuantisedWeight:
        turned = self.transposed if transposed is None else transposed
        result = QuantisedWeight(numbers, scales, self.form, self.dtype, transposed=turned)
        result.padded = self.padded
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantisedWeight({list(self.shape)}, {self.form.name}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation = KEPT.get(func)
        if operation is not None and (result := operation(*args, **(kwargs or {}))) is not None:
            return result
        if func._schema.is_mutable and isinstance(args[0], QuantisedWeight):
            raise TypeError(f"{func} would change a quantised weight")
        args, kwargs = tree_map_only(QuantisedWeight, QuantisedWeight.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scales"], (self.form, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], facts: Any, size: Any, stride: Any) -> QuantisedWeight:
        form, dtype, transposed = facts
        return QuantisedWeight(tensors["numbers"], tensors["scales"], form, dtype, transposed=transposed)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """What ranks gather of their rows: as many of each rank."""
        missing = max(0, self.padded - len(self))
        parts = (
            torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part for part in self._parts
        )
        return tuple(parts), (self.form, self.dtype)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], facts: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight of all ranks' rows; an ``out`` has them as its storage already."""
        if out is not None:
            return None
        return QuantisedWeight(gathered[0], gathered[1], *facts), gathered


def dense(weight: Tensor) -> Tensor:
    """A weight as floats."""
    return weight.dense() if isinstance(weight, QuantisedWeight) else weight


def stored_parts(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a weight is stored in."""
    return weight._parts if isinstance(weight, QuantisedWeight) else (weight,)


def _same(weight: QuantisedWeight, *_: Any, **__: Any) -> Any:
    return weight._with(*weight._parts)


def _both(change: Callable[..., Tensor]) -> Callable[..., Any]:
    """The same change of numbers and scales, of which each row has its own."""

    def changed(weight: QuantisedWeight, *rest: Any, **named: Any) -> Any:
        if not isinstance(weight, QuantisedWeight) or weight.transposed:
            return None
        return weight._with(change(weight.numbers, *rest, **named), change(weight.scales, *rest, **named))

    return changed


def _turned(weight: QuantisedWeight, *axes: int) -> Any:
    count = weight.ndim
    last_two = not axes or {axis % count for axis in axes} == {count - 2, count - 1}
    return weight._with(*weight._parts, transposed=not weight.transposed) if last_two else None


def _permuted(weight: QuantisedWeight, axes: Any) -> Any:
    order = list(range(weight.ndim))
    changed = [axis for axis, other in zip(order, axes) if axis != other % weight.ndim]
    return _turned(weight, *changed) if changed == order[-2:] else None


def _split(weight: QuantisedWeight, sizes: Any, axis: int = 0) -> Any:
    if axis or weight.transposed:
        return None
    parts = zip(weight.numbers.split(sizes), weight.scales.split(sizes))
    return [weight._with(*part) for part in parts]


def _sliced(
    weight: QuantisedWeight, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if axis or weight.transposed:
        return None
    return weight._with(*(part[start:end:step] for part in weight._parts))


def _unbound(weight: QuantisedWeight, axis: int = 0) -> Any:
    if axis or weight.ndim < 3:
        return None
    return [weight._with(*part) for part in zip(weight.numbers, weight.scales)]


def _selected(weight: QuantisedWeight, axis: int, index: int) -> Any:
    return weight._with(*(part[index] for part in weight._parts)) if not axis and weight.ndim > 2 else None


def _zeros(weight: QuantisedWeight, size: Any, **_: Any) -> Any:
    if weight.transposed or tuple(size[1:]) != tuple(weight.shape[1:]):
        return None
    numbers, scales = (part.new_zeros(size[0], *part.shape[1:]) for part in weight._parts)
    zeros = weight._with(numbers, scales)
    zeros.padded = size[0]
    return zeros


def _strided(weight: QuantisedWeight, size: Any, stride: Any, offset: int = 0) -> Any:
    """The first rows, of what ranks have gathered with rows that fill up."""
    plain = torch.empty(size, device="meta").stride()
    if weight.transposed or offset or tuple(stride) != plain or tuple(size[1:]) != tuple(weight.shape[1:]):
        return None
    return weight._with(*(part[: size[0]] for part in weight._parts))


def _view(weight: QuantisedWeight, size: Any) -> Any:
    if tuple(size) == tuple(weight.shape):
        return _same(weight)
    if weight.transposed or tuple(size) not in {(-1,), (weight.numel(),)}:
        return None
    return weight._with(weight.numbers.view(-1), weight.scales.view(-1))


def _copied(weight: QuantisedWeight, source: Tensor, *_: Any) -> Any:
    """Numbers and scales of one weight into another of its kind."""
    if not (isinstance(weight, QuantisedWeight) and isinstance(source, QuantisedWeight)):
        return None
    weight.numbers.copy_(source.numbers)
    weight.scales.copy_(source.scales)
    return weight


def _moved(weight: QuantisedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, weight.dtype):
        return dense(weight).to(dtype=dtype, device=device)
    parts = (part.to(device=device, **_plain(options)) for part in weight._parts)
    return weight._with(*parts)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name == "non_blocking"}


KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _both(lambda part, **_: part.clone()),
    aten.t.default: _turned,
    aten.transpose.int: _turned,
    aten.permute.default: _permuted,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _sliced,
    aten.unbind.int: _unbound,
    aten.select.int: _selected,
    aten.new_zeros.default: _zeros,
    aten.view.default: _view,
    aten.as_strided.default: _strided,
    aten.copy_.default: _copied,
    aten._to_copy.default: _moved,
}
"""Operations whose result is quantised, or None where it is not."""


def dequantise(
    numbers: Tensor, scales: Tensor, form: NumberForm, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The floats of stored numbers: products in float32, rounded to ``dtype``; [..., columns].

    Args:
        out: of that shape and dtype, without gaps; else it is made
    """
    if out is None:
        out = torch.empty((*numbers.shape[:-1], numbers.shape[-1] * form.per_byte), dtype=dtype, device=numbers.device)
    if by_triton(scales) and numbers.numel():
        from slime_core.kernels.quantised_cuda import dequantise as by_kernel

        table = _table(numbers.device) if form.name == "nf4" else None
        by_kernel(numbers.contiguous(), scales.contiguous(), table, form.block, out)
        return out
    if form.name == "nf4":
        values = _table(numbers.device)[torch.stack((numbers >> 4, numbers & 15), -1).int()]
    else:
        values = numbers.view(torch.float8_e4m3fn).float()
    blocks = values.view(*scales.shape, form.block)
    out.view(blocks.shape).copy_(blocks * scales[..., None])
    return out


def _shortest(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in ``dtype``, where that has all their values, else as they are."""
    short = scales.to(dtype)
    return short if torch.equal(short.float(), scales) else scales


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest value of each number, times the largest of its block."""
    values = _table(weight.device)
    blocks = weight.view(*weight.shape[:-1], -1, FORMS["nf4"].block)
    scales = blocks.abs().amax(-1)
    shares = (blocks * (1 / scales.clamp(min=1e-38))[..., None]).clamp(-1, 1)
    indices = torch.zeros(shares.shape, dtype=torch.uint8, device=weight.device)
    for border in ((values[1:] + values[:-1]) / 2).tolist():  # twice as fast as a search on a processor
        indices += shares > border
    indices = indices.view(weight.shape)
    return indices[..., ::2] << 4 | indices[..., 1::2], scales


def _fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `weights.fp8` has it; each row with the scales of its blocks."""
    form = BlockFormat()
    scales = form.scales(matrix)
    return form.quantise(matrix, scales).view(torch.uint8), _by_row(scales, len(matrix))


def _by_row(scales: Tensor, rows: int) -> Tensor:
    """Scales of blocks, each row with its own."""
    return scales.repeat_interleave(BlockFormat().height, 0)[:rows]
