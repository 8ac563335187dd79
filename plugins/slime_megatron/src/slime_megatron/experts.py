"""All experts of a rank in one matrix product a layer, without Transformer Engine: `slime_core.kernels.grouped`.

    rows, sorted by expert [T, h] -> fc1 of each run of rows -> activation, times the router's weights -> fc2 [T, h]

Parameters, their names and their shards are those of megatron-core's SequentialMLP: a matrix an expert. Nothing is
summed here: with expert tensor parallelism the token dispatcher gathers rows before, and sums what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from slime_core.kernels.grouped import add_gradient, gradient, multiply, weighted_swiglu
from slime_core.kernels.quantised import QuantisedWeight

Held = tuple[torch.Tensor, torch.Tensor | None]


class HeldColumns(ColumnParallelLinear):  # type: ignore[misc]
    """A first matrix that is asked for: hooks before it wait until data-parallel ranks have gathered the weight."""

    def forward(self) -> Held:
        """Weight and bias."""
        return self.weight, self.bias


class HeldRows(RowParallelLinear):  # type: ignore[misc]
    """A second one."""

    def forward(self) -> Held:
        """Weight and bias."""
        return self.weight, self.bias


class LastFirst(torch.nn.ModuleList):
    """Modules that are registered from the last to the first, and iterate from the first.

    megatron-core fills its buffers from the last parameter on, so there the weights of experts lie in their order.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Any:
        return reversed(self._modules.values())


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """SequentialMLP in one product for all experts of the rank, from `spec`."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, submodules, **kwargs)
        experts: Any = self._modules.pop("local_experts")
        self.local_experts: Any = LastFirst([*experts])
        self.recomputes = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        self.direct = False  # set where no hook of a single weight has anything to do: then none is called
        self._linears: dict[str, list[Held]] = {}

    @torch.no_grad()
    def lay_together(self) -> None:
        """Have frozen weights at equal distances, where no gradient buffer has them so."""
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            if isinstance(weights[0], QuantisedWeight):  # each is made floats for its product
                continue
            for weight, place in zip(weights, torch.stack(weights), strict=True):
                weight.data = place

    def _weights(self, name: str) -> list[Held]:
        """Weight and bias of every expert's ``linear_fc1`` or ``linear_fc2``."""
        if not self.direct:
            return [getattr(expert, name)() for expert in self.local_experts]
        if name not in self._linears:
            linears = [getattr(expert, name) for expert in self.local_experts]
            self._linears[name] = [(linear.weight, linear.bias) for linear in linears]
        return self._linears[name]

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """What the experts make of their rows, and no bias: that is in it.

        Args:
            rows: [T, h], sorted by expert.
            counts: how many each expert has, [experts]; some may have none.
            probs: the router's weight of each row, [T].
        """
        if self.config.moe_apply_probs_on_input:
            rows, probs = (rows * probs[:, None]).to(rows.dtype), torch.ones_like(probs)
        ends = counts.to(rows.device).cumsum(0, dtype=torch.int32)
        columns = self._weights("linear_fc1")
        hidden = self._product(rows, ends, "linear_fc1", [weight for weight, _ in columns])
        bias = _of_rows([bias for _, bias in columns], counts, rows)
        if self.recomputes:
            checkpoint = CheckpointWithoutOutput(fp8=None)  # its False means that there is some
            hidden = checkpoint.checkpoint(self._activated, hidden, bias, probs)
        else:
            hidden = self._activated(hidden, bias, probs)
        heights = self._weights("linear_fc2")
        out = self._product(hidden, ends, "linear_fc2", [weight for weight, _ in heights])
        if self.recomputes:
            checkpoint.discard_output_and_register_recompute(out)
        if (bias := _of_rows([bias for _, bias in heights], counts, rows)) is not None:
            out = (out + bias * probs[:, None]).to(out.dtype)
        return out, None

    def _product(
        self, rows: torch.Tensor, ends: torch.Tensor, name: str, weights: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Each run of rows times its expert's matrix, and its adapter's where there is one."""
        modes = {"within": self.config.gradient_accumulation_fusion, "direct": self.direct}
        out: torch.Tensor = product(rows, ends, weights, **modes)
        adapters: Any = [getattr(getattr(expert, name), "low_rank", None) for expert in self.local_experts]
        if adapters[0] is None or not adapters[0].switch.on:
            return out
        low = product(rows, ends, [one.a[0] for one in adapters], **modes)
        scaling: float = adapters[0].switch.spec.scaling
        return out + product(low, ends, [one.b[0] for one in adapters], **modes) * scaling

    def _activated(self, hidden: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        """The activation of [T, f] or, gated, of [T, 2 f], times the router's weights; as `MLP.forward` has it."""
        config, weights = self.config, probs[:, None]
        act, gated, offset = config.activation_func, config.gated_linear_unit, config.glu_linear_offset
        most = config.activation_func_clamp_value
        if config.bias_activation_fusion and gated and bias is None:
            fp8: bool = config.activation_func_fp8_input_store
            if act is F.silu and most is None and not offset and not fp8:
                return weighted_swiglu(hidden, probs)
            if act is quick_gelu:
                geglu: torch.Tensor = weighted_bias_quick_geglu_impl(hidden, None, weights, fp8, offset, most)
                return geglu
        if bias is not None:
            hidden = hidden + bias
        activated: torch.Tensor
        if gated:
            gate, up = hidden.chunk(2, dim=-1)
            if most is not None:
                gate, up = gate.clamp(max=most), up.clamp(min=-most, max=most)
            activated = act(gate) * (up + offset)
        else:
            activated = act(hidden)
        return (activated * weights).to(hidden.dtype)


def grouped_spec() -> ModuleSpec:
    """What stands for the experts in a layer's spec."""
    return ModuleSpec(GroupedExperts, submodules=MLPSubmodules(linear_fc1=HeldColumns, linear_fc2=HeldRows))


def alone(fields: Mapping[str, Any], *, grouped: bool) -> Any:
    """Experts without the layer around them, on the only rank of the default process group: one product, or a loop.

    For tests and benchmarks, which compare the two. ``fields`` are of TransformerConfig.
    """
    config, one = TransformerConfig(**fields), dist.group.WORLD
    loop = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    spec = grouped_spec() if grouped else ModuleSpec(SequentialMLP, submodules=loop)
    groups = ProcessGroupCollection(ep=one, expt_tp=one, expt_dp=one)
    return spec.module(config.num_moe_experts, config, spec.submodules, pg_collection=groups)


def product(
    rows: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    within: bool = False,
    direct: bool = False,
) -> torch.Tensor:
    """Each run of rows times its own matrix.

    Args:
        rows: [T, in]; sizes of both axes of matrices are multiples of 16 bytes.
        ends: where the run of each matrix ends, [E] int32.
        weights: E matrices [out, in], in the dtype of rows or, of adapters, in float32.
        within: add gradients of weights that have a ``main_grad`` to it, all at once, in the backward pass itself.
        direct: then autograd sees the first weight alone: a leaf for each of hundreds takes longer than the product.

    Returns:
        [T, out].
    """
    out: torch.Tensor
    if direct and within and hasattr(weights[0], "main_grad"):
        out = _DirectProduct.apply(rows, ends, weights, weights[0])
    else:
        out = _Product.apply(rows, ends, within, *weights)
    return out


class _Product(torch.autograd.Function):
    """Where weights have to be stacked, the stack is made again in the backward pass: kept, it is the model twice."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ends: torch.Tensor, within: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        ctx.within = within
        return multiply(rows, stacked(weights).to(rows.dtype), ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows: torch.Tensor | None = None
        of_weights: Sequence[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = multiply(grad, stacked(weights).to(grad.dtype), ends, transposed=True)
        if any(ctx.needs_input_grad[3:]):
            if ctx.within and hasattr(weights[0], "main_grad"):
                _accumulate(weights, grad, rows, ends)
                of_weights = weights[0].new_empty(len(weights), *weights[0].shape).unbind()
            else:
                of_weights = gradient(grad, rows, ends).unbind()
        return of_rows, None, None, *of_weights


class _DirectProduct(torch.autograd.Function):
    """A product whose weights are no arguments but the first, which stands for all."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor], first: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weights = weights
        return multiply(rows, stacked(weights).to(rows.dtype), ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = (
            multiply(grad, stacked(ctx.weights).to(grad.dtype), ends, transposed=True)
            if ctx.needs_input_grad[0]
            else None
        )
        _accumulate(ctx.weights, grad, rows, ends)
        return of_rows, None, None, torch.empty_like(ctx.weights[0])


def _accumulate(weights: Sequence[Any], grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> None:
    """Add gradients to those of the weights; megatron-core then reads nothing of what is returned for them."""
    totals = [weight.main_grad for weight in weights]
    view = at_equal_distances(totals)
    if view is not None:
        add_gradient(view, grad, rows, ends)
    else:
        torch._foreach_add_(totals, list(gradient(grad, rows, ends).unbind()))
    for weight in weights:
        weight.grad_added_to_main_grad = True


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices as [E, out, in]: a view where they lie at equal distances, as in megatron-core's buffers, or a copy."""
    view = None if isinstance(weights[0], QuantisedWeight) else at_equal_distances(weights)
    return torch.stack(tuple(weights)) if view is None else view


def at_equal_distances(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of matrices as [E, out, in] where they lie at equal distances in one storage."""
    first, last = weights[0], weights[-1]
    starts = [weight.data_ptr() for weight in weights]
    step = starts[1] - starts[0] if len(starts) > 1 else first.nbytes
    if (
        step >= first.nbytes
        and starts == list(range(starts[0], starts[0] + len(starts) * step, step))
        and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and first.is_contiguous()
    ):
        return first.as_strided((len(weights), *first.shape), (step // first.itemsize, *first.stride()))
    return None


def _of_rows(biases: Sequence[torch.Tensor | None], counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """Each expert's bias at its rows, [T, n]."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    return torch.stack(present).repeat_interleave(counts.to(rows.device), 0, output_size=len(rows))
