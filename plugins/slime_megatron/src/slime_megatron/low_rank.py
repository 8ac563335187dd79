"""Linear layers of megatron-core with adapters: y = W x + scaling B A x, with A and B dealt to ranks as W is.

    column-parallel   A whole, B's rows dealt       rows of x --A--> low --gather or copy--> B --> columns of y
    row-parallel      A's columns dealt, B whole    columns of x --A--> low --sum--> B --> rows of y

Only the low rank travels. A layer that is several of transformers' (q, k and v; gate and up) has an A and a B of each:
the As lie over each other, the Bs side by side in the rows of the layer's own order, with 0 elsewhere. Of several
adapters a pass computes with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

from slime_convert.bridge import Entry, Sizes, join, part
from slime_core.lora.dropout import Dropout
from slime_core.lora.layers import add_low
from slime_megatron.adapter_entries import KINDS, AdapterPart
from slime_megatron.experts import HeldColumns, HeldRows
from slime_megatron.linear_attention import Projection

if TYPE_CHECKING:
    from slime_core.lora.spec import LoraSpec

Tensor = torch.Tensor


class AdapterSwitch:
    """What the passes of a stage compute: with which adapter, or the base alone; one object for all its layers."""

    def __init__(self, spec: LoraSpec, name: str) -> None:
        self.spec, self.name, self.on = spec, name, True
        self.dropout = Dropout(spec.dropout)
        self.rows: tuple[Tensor, ...] = ()  # keys of the rows of the pass: all, and this tensor-parallel rank's

    def take_rows(self, layer: Any, args: Any, kwargs: Any) -> None:
        """Before a layer, computed again or not: the rows of its pack."""
        self.rows = kwargs["packed_seq_params"].row_keys

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Passes inside the block compute with this adapter."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before

    @contextmanager
    def base(self) -> Iterator[None]:
        """Passes inside the block compute without an adapter."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


@dataclass(slots=True, frozen=True)
class RankFactors:
    """An adapter's factors of one layer: this rank's shards of those of each of its parts."""

    a: list[nn.Parameter]  # [r, in or its share]
    b: list[nn.Parameter]  # [out or its share, r]
    magnitude: list[nn.Parameter]  # [out or its share], of DoRA; else none


@dataclass(slots=True)
class LayerAdapter:
    """The adapters of one layer, of which ``a``, ``b`` and ``magnitude`` are those of the one in use."""

    switch: AdapterSwitch
    entry: Entry
    sizes: Sizes  # heads are those of this rank
    group: Any  # ranks that share the layer
    parts: Sequence[AdapterPart]
    factors: dict[str, RankFactors] = field(default_factory=dict)  # by adapter
    adds_bias: bool = False  # the layer leaves its bias to the adapter

    @property
    def a(self) -> list[nn.Parameter]:
        """[r, in or its share]."""
        return self.factors[self.switch.name].a

    @property
    def b(self) -> list[nn.Parameter]:
        """[out or its share, r]."""
        return self.factors[self.switch.name].b

    @property
    def magnitude(self) -> list[nn.Parameter]:
        """[out or its share], of DoRA; else none."""
        return self.factors[self.switch.name].magnitude

    def lower(self, x: Tensor) -> Tensor:
        """A x of all parts, [..., parts * r]; in training of what dropout leaves of x."""
        if not self.switch.rows:
            return F.linear(x, self.down(x.dtype))
        return torch.cat([F.linear(self._dropped(x, p), a.to(x.dtype)) for p, a in zip(self.parts, self.a)], dim=-1)

    def add(self, y: Tensor, low: Tensor, weight: Tensor) -> Tensor:
        """y + scaling B low, with DoRA times magnitudes over norms of rows; y is W x without a bias then."""
        y = add_low(y, low, self.up(y.dtype), self.switch.spec.scaling)
        return y * self.scale(weight).to(y.dtype) if self.magnitude else y

    def biased(self, y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the layer gives."""
        return (y + bias, None) if self.adds_bias and bias is not None else (y, bias)

    def down(self, dtype: torch.dtype) -> Tensor:
        """The As over each other, [parts * r, in]."""
        return torch.cat([a.to(dtype) for a in self.a]) if len(self.a) > 1 else self.a[0].to(dtype)

    def up(self, dtype: torch.dtype) -> Tensor:
        """The Bs side by side, [out, parts * r], in the order of the layer's rows."""
        rank, more = self.b[0].shape[1], len(self.b) - 1
        bs = [b.to(dtype) for b in self.b]
        return self._ordered([F.pad(b, (n * rank, (more - n) * rank)) for n, b in enumerate(bs)] if more else bs)

    def scale(self, weight: Tensor) -> Tensor:
        """Magnitudes over the norms of rows of W + scaling B A, which are constants to the gradient; [out] float32."""
        with torch.no_grad():  # section 4.3 of arXiv:2402.09353
            product = self.up(torch.float32) @ self.down(torch.float32)
            norms = self._norms(product.mul_(self.switch.spec.scaling).add_(weight))
        scale = self._ordered(self.magnitude) / norms
        if len(self.parts) < len(self.entry.hf):  # rows of parts without an adapter keep their size
            scale = scale + 1 - self._ordered([torch.ones_like(one) for one in self.magnitude])
        return scale

    @torch.no_grad()
    def start_magnitudes(self, weight: Tensor) -> None:
        """Norms of rows of the base, for each adapter."""
        norms = self._norms(weight.float())
        of_parts = part(self.entry, norms, self.sizes) if len(self.entry.hf) > 1 else [norms]
        for factors in self.factors.values():
            for one, magnitude in zip(self.parts, factors.magnitude):
                magnitude.copy_(of_parts[one.index])

    def _norms(self, weight: Tensor) -> Tensor:
        squares = weight.square().sum(1)
        if self.entry.kind == "columns":
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt_()

    def _ordered(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of parts in the order of the layer's own, 0 where a part has no adapter."""
        if self.parts[0].index < 0 or len(self.entry.hf) == 1:
            return parts[0]
        rows = {one.index: tensor for one, tensor in zip(self.parts, parts, strict=True)}
        for index, shape in enumerate(self.entry.shapes):
            if index not in rows:
                rows[index] = parts[0].new_zeros(shape[0] // self.group.size(), *parts[0].shape[1:])
        return join(self.entry, [rows[index] for index in range(len(rows))], self.sizes)

    def _dropped(self, x: Tensor, one: AdapterPart) -> Tensor:
        dropout = self.switch.dropout
        dropout.rows = next(keys for keys in self.switch.rows if len(keys) == len(x))
        first = self.group.rank() * x.shape[-1] if self.entry.kind == "columns" else 0
        return dropout(x.transpose(0, -2), one.number, first).transpose(0, -2)


class LowRankColumns(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer with an adapter; :func:`adapt` makes one of a layer in place."""

    low_rank: LayerAdapter

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        y, bias = super().forward(input_, *args, **kwargs)
        adapter = self.low_rank
        if adapter.switch.on:
            low = adapter.lower(input_)
            if self.sequence_parallel and not self.explicit_expert_comm:
                low = gather_from_sequence_parallel_region(low, group=self.tp_group)
            elif not self.explicit_expert_comm:
                low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
            y = adapter.add(y, low, self.weight)
        return adapter.biased(y, bias)


class LowRankRows(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel layer with an adapter."""

    low_rank: LayerAdapter

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        y, bias = super().forward(input_)
        adapter = self.low_rank
        if adapter.switch.on:
            low = adapter.lower(input_)
            if self.explicit_expert_comm:  # what gives and takes the tokens sums
                pass
            elif self.sequence_parallel:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
            else:
                low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
            y = adapter.add(y, low, self.weight)
        return adapter.biased(y, bias)


class LowRankProjection(Projection):
    """A projection of linear attention with an adapter; its rows are gathered already."""

    low_rank: LayerAdapter

    def forward(self, x: Tensor) -> Tensor:
        y, adapter = super().forward(x), self.low_rank
        return adapter.add(y, adapter.lower(x), self.weight) if adapter.switch.on else y


class LowRankSharedExperts(SharedExpertMLP):  # type: ignore[misc]
    """A shared expert whose gate has an adapter: the gate's one row is merged for every pass."""

    low_rank: LayerAdapter

    @property
    def gate_weight(self) -> Tensor:
        """[1, hidden]."""
        weight: Any = self._parameters["gate_weight"]
        adapter = self.low_rank
        if not adapter.switch.on:
            return weight  # type: ignore[no-any-return]
        merged: Tensor = weight + adapter.up(weight.dtype) @ adapter.down(weight.dtype) * adapter.switch.spec.scaling
        return merged * adapter.scale(weight).to(weight.dtype)[:, None] if adapter.magnitude else merged


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: LowRankColumns,
    RowParallelLinear: LowRankRows,
    Projection: LowRankProjection,
    SharedExpertMLP: LowRankSharedExperts,
    HeldColumns: HeldColumns,  # `GroupedExperts` multiplies by what they have
    HeldRows: HeldRows,
}
"""Layers that can have adapters, and what they become."""


def adapt(module: Any, low_rank: LayerAdapter) -> None:
    """Give a layer its adapters. Parameters are the layer's own, so that hooks before it wait for them too."""
    module.__class__ = CLASSES[type(module)]
    module.low_rank = low_rank
    for adapter, factors in enumerate(low_rank.factors.values()):
        for kind, parameters in zip(KINDS, (factors.a, factors.b, factors.magnitude)):
            for number, parameter in enumerate(parameters):
                module.register_parameter(f"{kind}_{adapter}_{number}", parameter)
    if low_rank.switch.spec.use_dora and not getattr(module, "skip_bias_add", True):
        module.skip_bias_add = low_rank.adds_bias = True


def is_summed(module: Any, dealt: bool, group: Any) -> bool:
    """Whether each rank of a layer's group has a part of a factor's gradient, which is whole on none.

    Args:
        dealt: the factor itself is
    """
    of_rows = isinstance(module, Projection) or getattr(module, "explicit_expert_comm", False)
    config = getattr(module, "config", None)
    return bool(group.size() > 1 and not dealt and (of_rows or (config is not None and config.sequence_parallel)))


def sum_gradients(chunks: Sequence[Any]) -> None:
    """Sum what ranks that share a layer have of the gradients of its whole factors; a collective.

    Args:
        chunks: of the stage, in megatron-core's DistributedDataParallel
    """
    by_group: dict[Any, list[Tensor]] = {}
    for chunk in chunks:
        for parameter in chunk.params_with_grad:
            if (group := getattr(parameter, "summed_over", None)) is not None:
                by_group.setdefault(group, []).append(parameter.main_grad)
    for group, grads in by_group.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
