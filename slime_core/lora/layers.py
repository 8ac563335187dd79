"""Linear layers and experts with adapters: y = W x + scaling B A x, the base W frozen, A and B in float32.

A layer keeps its module and its parameters' names; its class is replaced by one that has adapters too, so base weights
have their names of a model folder. Products compute in the dtype of the input.

    model.layers.0.self_attn.q_proj   weight [out, in]        lora_A.NAME [r, in]              lora_B.NAME [out, r]
    model.layers.0.mlp.experts        down_proj [E, out, in]  lora_A.down_proj.NAME [E, r, in] lora_B.down_proj.NAME
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from slime_core.errors import ConfigError
from slime_core.kernels.grouped import grouped_product
from slime_core.lora.dropout import Dropout
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.seeds import seed_of

Tensor = torch.Tensor
Gather = Callable[[Tensor], Tensor]
ALIGNED = 16  # bytes that an axis of a grouped product on a GPU is a multiple of


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def delta(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """scaling B A in float32, or wider where they are: [out, in], or [E, out, in] of experts."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (scaling * b.to(wide)) @ a.to(wide)


def merged(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    magnitude: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The base and its adapter as one weight: summed in float32, rounded once to ``dtype``, the base's where None.

    Args:
        magnitude: [out], of DoRA
    """
    total = delta(a, b, scaling)
    if magnitude is not None:
        total.add_(weight)
        return total.mul_((magnitude / total.norm(dim=-1)).unsqueeze(-1)).to(dtype or weight.dtype)
    return torch.add(total, weight, out=total.new_empty(total.shape, dtype=dtype or weight.dtype))  # in one pass


class Adapters:
    """The adapters of a model: by name, and which one its passes use.

    Example:
        adapters = attach(model, LoraSpec(rank=8), seed=0)
        with adapters.using(None):
            model(input_ids=ids)  # the base
    """

    def __init__(self, spec: LoraSpec, names: Sequence[str]) -> None:
        self.spec, self.names = spec, tuple(names)
        self.active: str | None = self.names[0]
        self.dropout = Dropout(spec.dropout)
        self.modules: dict[str, LoraLinear | LoraExperts] = {}  # by full name

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Passes inside the block use an adapter, or None, the base."""
        before, self.active = self.active, name
        try:
            yield
        finally:
            self.active = before

    def parameters(self, adapter: str | None = None) -> dict[str, nn.Parameter]:
        """What learns by full name: of one adapter, or of all."""
        return {
            f"{name}.{key}": parameter
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters(recurse=True)
            if key.startswith("lora_") and adapter in (None, key.rpartition(".")[2])
        }

    def idle(self) -> set[nn.Parameter]:
        """Parameters of the adapters that are not in use."""
        return {*self.parameters().values()} - {*self.parameters(self.active).values()}

    def weights(self) -> dict[str, tuple[LoraLinear | LoraExperts, str]]:
        """Base weights that have adapters, by full name: the module, and the weight's name there."""
        return {f"{name}.{key}": (module, key) for name, module in self.modules.items() for key in module.adapted}


class LoraLinear(nn.Linear):
    """A linear layer with adapters; :func:`attach` makes one of a linear layer in place."""

    adapters: Adapters
    lora_A: nn.ParameterDict  # peft's names
    lora_B: nn.ParameterDict
    lora_magnitude_vector: nn.ParameterDict
    number: int  # of the layer among those with adapters
    adapted = ("weight",)

    def add(self, adapter: str, spec: LoraSpec, seed: int, name: str) -> None:
        """A fresh adapter, whose product is 0."""
        a = initial_factor((spec.rank, self.in_features), seed_of(seed, "lora", adapter, name), self.weight.device)
        self.lora_A[adapter] = nn.Parameter(a)
        self.lora_B[adapter] = nn.Parameter(torch.zeros(self.out_features, spec.rank, device=self.weight.device))
        if spec.use_dora:
            self.lora_magnitude_vector[adapter] = nn.Parameter(self.base_weight().detach().float().norm(dim=1))

    def base_weight(self) -> Tensor:
        """The base [out, in] in the dtype of compute."""
        return self.weight

    def base(self, x: Tensor) -> Tensor:
        """What the layer computes without adapters."""
        return F.linear(x, self.base_weight(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.adapters.active
        if adapter is None:
            return self.base(x)
        y: Tensor
        a, b, spec = self.lora_A[adapter], self.lora_B[adapter], self.adapters.spec
        low = F.linear(self.adapters.dropout(x, self.number), a.to(x.dtype))
        if not spec.use_dora:
            return add_low(self.base(x), low, b.to(x.dtype), spec.scaling)
        weight = self.base_weight()
        with torch.no_grad():  # section 4.3: the norm is a constant to the gradient
            norm = delta(a, b, spec.scaling).add_(weight).norm(dim=1)
        scale = (self.lora_magnitude_vector[adapter] / norm).to(x.dtype)
        y = add_low(F.linear(x, weight), low, b.to(x.dtype), spec.scaling) * scale
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def merged(self, key: str, adapter: str, dtype: torch.dtype | None = None, gather: Gather = _itself) -> Tensor:
        """The weight that an engine without adapters computes with; ``gather`` makes shards whole."""
        magnitude = gather(self.lora_magnitude_vector[adapter]) if self.adapters.spec.use_dora else None
        factors = gather(self.lora_A[adapter]), gather(self.lora_B[adapter])
        return merged(gather(self.base_weight()), *factors, self.adapters.spec.scaling, magnitude, dtype=dtype)


def add_low(y: Tensor, low: Tensor, b: Tensor, scaling: float) -> Tensor:
    """y + scaling low B^T, in one pass over y [..., out]; low is [..., r]."""
    rows = torch.addmm(y.reshape(-1, y.shape[-1]), low.reshape(-1, low.shape[-1]), b.T, alpha=scaling)
    return rows.view(y.shape)


class LoraExperts(nn.Module):
    """What a layer of stacked experts becomes that has adapters: its own class, with this one before it."""

    adapters: Adapters
    lora_A: nn.ModuleDict  # of parameter dicts by the name of the base weight
    lora_B: nn.ModuleDict
    number: int
    adapted: tuple[str, ...]
    num_experts: int
    is_transposed: bool  # matrices are [in, out]
    has_gate: bool
    has_bias: bool

    def add(self, adapter: str, spec: LoraSpec, seed: int, name: str) -> None:
        """A fresh adapter of each weight that has some, whose products are 0."""
        for key in self.adapted:
            weight = getattr(self, key)
            count, rows, columns = weight.shape
            out, inputs = (columns, rows) if self.is_transposed else (rows, columns)
            seed_here = seed_of(seed, "lora", adapter, f"{name}.{key}")
            a, b = (_dict(factors, key) for factors in (self.lora_A, self.lora_B))
            a[adapter] = nn.Parameter(initial_factor((count, spec.rank, inputs), seed_here, weight.device))
            b[adapter] = nn.Parameter(torch.zeros(count, out, spec.rank, device=weight.device))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        layer: Any = self
        hidden: Tensor
        count = top_k_index.shape[1]
        experts, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        hidden = self._product(hidden_states[order // count], first, experts, ends)
        hidden = layer._apply_gate(hidden) if self.has_gate else layer.act_fn(hidden)
        rows = self._product(hidden, "down_proj", experts, ends) * top_k_weights.flatten()[order, None]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        total: Tensor = rows[place].unflatten(0, (-1, count)).sum(1)
        return total.to(hidden_states.dtype)

    def _product(self, rows: Tensor, key: str, experts: Tensor, ends: Tensor) -> Tensor:
        weight = getattr(self, key)
        y: Tensor = _by_expert(rows, weight.transpose(1, 2) if self.is_transposed else weight, ends)
        if self.has_bias:
            y = y + getattr(self, f"{key}_bias")[experts]
        adapter = self.adapters.active
        if adapter is None or key not in self.adapted:
            return y
        a, b = (_dict(factors, key)[adapter].to(rows.dtype) for factors in (self.lora_A, self.lora_B))
        return y + _by_expert(_by_expert(rows, a, ends), b, ends) * self.adapters.spec.scaling

    @torch.no_grad()
    def merged(self, key: str, adapter: str, dtype: torch.dtype | None = None, gather: Gather = _itself) -> Tensor:
        """The stack of weights that an engine without adapters computes with; ``gather`` makes shards whole."""
        weight, scaling = gather(getattr(self, key)), self.adapters.spec.scaling
        a, b = (gather(_dict(factors, key)[adapter]) for factors in (self.lora_A, self.lora_B))
        if not self.is_transposed:
            return merged(weight, a, b, scaling, dtype=dtype)
        return merged(weight.transpose(1, 2), a, b, scaling, dtype=dtype).transpose(1, 2)


def _by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each run of rows [T, in] by its matrix of ``weight`` [E, out, in]: [T, out]."""
    aligned = all(size * rows.element_size() % ALIGNED == 0 for size in weight.shape[1:])
    if rows.is_cuda and aligned and weight.is_contiguous():
        return grouped_product(rows, weight, ends)
    stops = [0, *ends.tolist()]
    return torch.cat([rows[i:j] @ one.T for i, j, one in zip(stops, stops[1:], weight)])


def _dict(factors: nn.ModuleDict, key: str) -> nn.ParameterDict:
    by_adapter = factors[key]
    assert isinstance(by_adapter, nn.ParameterDict)
    return by_adapter


def initial_factor(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """A as it starts: uniform within 1 / sqrt(in), which is kaiming-uniform of a = sqrt(5)."""
    values = np.random.Generator(np.random.Philox(seed)).random(math.prod(shape), dtype=np.float32)
    bound = 1 / math.sqrt(shape[-1])
    return torch.from_numpy(values).mul_(2 * bound).sub_(bound).view(shape).to(device)


def are_experts(module: Any) -> bool:
    """Whether a module holds stacked experts, as transformers has them."""
    return hasattr(module, "num_experts") and hasattr(module, "is_transposed")


def attach(
    model: Any, spec: LoraSpec, *, seed: int, names: Sequence[str] = (DEFAULT,), outside: Sequence[nn.Module] = ()
) -> Adapters:
    """Freeze a model of transformers and give its target layers adapters, in place.

    Args:
        names: of the adapters
        outside: modules that get none, such as a vision tower

    Raises:
        ConfigError: CFG04 a target that is not a linear layer or experts, or none.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    left_out = {id(module) for one in outside for module in one.modules()} | {id(head)}
    adapters, number = Adapters(spec, names), 0
    others: list[str] = []
    for name, module in list(model.named_modules()):
        if id(module) in left_out or not name:
            others.append(name)
            continue
        adapted: tuple[str, ...] = ()
        if are_experts(module):
            keys = [key for key in ("gate_up_proj", "up_proj", "down_proj") if getattr(module, key, None) is not None]
            adapted = tuple(key for key in keys if spec.targets_parameter(f"{name}.{key}", is_expert=True))
        elif spec.targets(name, type(module) is nn.Linear):
            if type(module) is not nn.Linear:
                raise _not_linear(name, module)
            adapted = LoraLinear.adapted
        else:
            others.append(name)
        if adapted:
            number += 1
            adapters.modules[name] = _adapt(module, adapted, adapters, number)
            for adapter in names:
                adapters.modules[name].add(adapter, spec, seed, name)
    if not adapters.modules:
        raise _no_target(model, spec)
    adapters.spec = spec.resolved(*_adapted(adapters), others)
    return adapters


def check_targets(model: Any, adapters: Adapters, spec: LoraSpec) -> None:
    """Refuse a target or an exclusion of ``spec`` that no layer of the model is, after :func:`attach`.

    Raises:
        ConfigError: CFG04 with all such names.
    """
    if missing := spec.unmatched(*_adapted(adapters)):
        raise _no_such_target(model, missing)
    layers = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) or are_experts(one)]
    if unused := spec.unused_exclusions(layers):
        raise _no_such_exclusion(model, unused)


def _adapted(adapters: Adapters) -> tuple[list[str], list[str]]:
    """Full names of linear layers with adapters, and of experts' weights with some."""
    linear = [name for name, module in adapters.modules.items() if isinstance(module, LoraLinear)]
    stacks = [name for name, (module, _) in adapters.weights().items() if isinstance(module, LoraExperts)]
    return linear, stacks


def _adapt(layer: nn.Module, adapted: tuple[str, ...], adapters: Adapters, number: int) -> LoraLinear | LoraExperts:
    """Give a layer its new class."""
    module: Any = layer
    module.adapters, module.number = adapters, number
    if adapted == LoraLinear.adapted:
        module.__class__ = LoraLinear
        module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        if adapters.spec.use_dora:
            module.lora_magnitude_vector = nn.ParameterDict()
        return module  # type: ignore[no-any-return]
    if adapters.spec.use_dora or adapters.spec.dropout:
        raise _plain_experts(adapters.spec)
    module.__class__ = type(f"Lora{type(module).__name__}", (LoraExperts, type(module)), {})
    module.adapted = adapted
    module.lora_A, module.lora_B = (nn.ModuleDict({key: nn.ParameterDict() for key in adapted}) for _ in range(2))
    return module  # type: ignore[no-any-return]


def _not_linear(name: str, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{name} is {type(module).__name__}, which has no adapters",
        code="CFG04",
        where="train.lora_target_modules",
        why="linear layers have adapters, and stacked experts by lora_target_parameters",
        fix="leave it out of lora_target_modules, or name it in lora_exclude_modules",
    )


def _no_such_target(model: Any, missing: Sequence[str]) -> ConfigError:
    stacks = any(are_experts(module) for module in model.modules())
    return ConfigError(
        f"targets of adapters that no layer of {type(model).__name__} is: {', '.join(missing)}",
        code="CFG04",
        where="train.lora_target_modules, train.lora_target_parameters",
        why=f"its linear layers are {_linear_layers(model)}; the output head has no adapters",
        fix="leave them out" + stacks * ", or name stacked experts: --lora-target-parameters experts.down_proj",
    )


def _no_such_exclusion(model: Any, unused: Sequence[str]) -> ConfigError:
    stacks = ", and experts" * any(are_experts(module) for module in model.modules())
    return ConfigError(
        f"modules without adapters that no layer of {type(model).__name__} is: {', '.join(unused)}",
        code="CFG04",
        where="train.lora_exclude_modules",
        why=f"its linear layers are {_linear_layers(model)}{stacks}; one string with other characters than a name "
        "has is a regex over full names",
        fix="leave them out, or name layers by ends of their names, such as o_proj or layers.0.mlp.up_proj",
    )


def _no_target(model: Any, spec: LoraSpec) -> ConfigError:
    layers = _linear_layers(model)
    return ConfigError(
        f"no layer of {type(model).__name__} is a target of adapters",
        code="CFG04",
        where="train.lora_target_modules",
        why=f"its linear layers are {layers or 'none'}, the targets {', '.join(spec.target_modules)}",
        fix=f"set lora_target_modules to some of them, or to {['all-linear']}" if layers else "--lora-rank 0",
    )


def _linear_layers(model: Any) -> str:
    """Names of linear layers but the output head."""
    head = model.get_output_embeddings()
    named = ((name, module) for name, module in model.named_modules() if module is not head)
    return ", ".join(sorted({name.rpartition(".")[2] for name, one in named if isinstance(one, nn.Linear)}))


def _plain_experts(spec: LoraSpec) -> ConfigError:
    key = "lora_use_dora" if spec.use_dora else "lora_dropout"
    return ConfigError(
        f"{key} with adapters on experts",
        code="CFG04",
        where=f"train.{key}",
        why="experts have plain LoRA, as in peft",
        fix=f"leave {key} out, or name linear layers alone in lora_target_modules",
    )
