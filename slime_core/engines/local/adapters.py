"""Adapters of the served model: low-rank products beside the base's, those of several adapters in one pass.

    y = W x + scaling B A x      A, B: of the row's own adapter; a row of the base gets W x alone

x [N, in] is multiplied by the A of all adapters at once, and what is not of the row's own becomes 0 before B. So the
shapes of a pass, and with them the bits of a row, do not depend on which adapters its neighbours use. All factors lie
in two tensors, in the dtype of compute, and a load writes into them: what was captured over them stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.nn.functional as F

from slime_core.errors import DataError, EngineError
from slime_core.kernels.linear import joined
from slime_core.lora.layers import delta
from slime_core.lora.spec import LoraSpec
from slime_core.trainers.fingerprint import checksums
from slime_core.weights.hashing import text_name

if TYPE_CHECKING:
    from slime_core.types import AdapterUpdate

Tensor = torch.Tensor
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
EMPTY = torch.empty(0)
BASE = -1
"""Stands for the base among numbers of adapters."""


@dataclass(slots=True)
class LayerFactors:
    """What the adapters have of one linear layer."""

    layer: torch.nn.Linear
    prefix: str  # of its tensors' names in an update
    a: Tensor = EMPTY  # [adapters, r, in]
    b: Tensor = EMPTY  # [out, adapters * r]
    scale: Tensor | None = None  # [1 + adapters, out] of DoRA: rows of outputs count so many times; the base's first

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] of one adapter, as views."""
        rank = self.a.shape[1]
        return self.a[number], self.b[:, number * rank : (number + 1) * rank]


class ServedAdapters:
    """The adapters of one model, whose layers add their products by hooks when they run as modules.

    Args:
        updates: of the first load; later ones have the same adapters, ranks and layers

    Raises:
        EngineError: ENG86 adapters that do not fit the model, or each other.
    """

    def __init__(self, model: Any, updates: Mapping[str, AdapterUpdate], dtype: torch.dtype, device: str) -> None:
        self.names = tuple(updates)
        self.spec = self._common_spec(updates)
        self.scaling = self.spec.scaling
        self._dtype, self._device = dtype, device
        self._numbers = torch.arange(len(self.names), device=device)
        layers = _targets(model, next(iter(updates.values())).tensors)
        self._ready = False
        self.layers = {id(layer): LayerFactors(layer, prefix) for prefix, layer in layers.items()}
        self._magnitudes: dict[tuple[str, int], Tensor] = {}  # by prefix and adapter
        self._named: dict[int, dict[str, Tensor]] = {}  # `_tensors` by adapter, until others are allocated
        self.hidden: Tensor | None = None  # [N or 1, adapters]: what is not of a row's own; None: all rows have one
        self.owners: Tensor | None = None  # [N]
        self.products: WeakSet[LowRank] = WeakSet()  # that read the factors
        self._allocate()
        for layer in layers.values():
            layer.register_forward_hook(_Hook(LowRank(self, [layer])))
        self.select(None)

    def _common_spec(self, updates: Mapping[str, AdapterUpdate]) -> LoraSpec:
        try:
            specs = {name: LoraSpec.from_peft(update.config, name) for name, update in updates.items()}
        except DataError as error:
            raise _misfit(error.what, error.why) from error
        first = specs[self.names[0]]
        for name, spec in specs.items():
            if (spec.rank, spec.scaling, spec.use_dora) != (first.rank, first.scaling, first.use_dora):
                raise _misfit(f"adapters {self.names[0]} and {name} differ", "they need one rank, alpha and kind")
        return first

    def _allocate(self) -> None:
        self._named.clear()
        count, rank = len(self.names), self.spec.rank
        sizes = [count * rank * factors.layer.in_features for factors in self.layers.values()]
        widths = [count * rank * factors.layer.out_features for factors in self.layers.values()]
        make: Any = {"dtype": self._dtype, "device": self._device}
        self._a, self._b = torch.zeros(sum(sizes), **make), torch.zeros(sum(widths), **make)
        for factors, a, b in zip(self.layers.values(), self._a.split(sizes), self._b.split(widths), strict=True):
            out = factors.layer.out_features
            factors.a, factors.b = a.view(count, rank, -1), b.view(out, -1)
            factors.scale = torch.ones(1 + count, out, **make) if self.spec.use_dora else None

    @property
    def ready(self) -> bool:
        """Whether weights were loaded and not released since."""
        return self._ready

    def addresses(self) -> tuple[int, ...]:
        """Where the factors lie."""
        return self._a.data_ptr(), self._b.data_ptr()

    @torch.no_grad()
    def load(self, updates: Mapping[str, AdapterUpdate]) -> None:
        """Take every adapter's tensors; the base that they are of is there.

        Raises:
            EngineError: ENG86 other adapters than before, tensors that do not fit (named), or numbers that are not
                finite where there are several adapters, which would reach all of them.
        """
        if tuple(updates) != self.names or self._common_spec(updates) != self.spec:
            raise _misfit("other adapters than those of the first update", f"those were: {', '.join(self.names)}")
        if not self._a.numel():
            self._allocate()
        self._ready = False
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, (name, update) in enumerate(updates.items()):
            own_tensors = self._tensors(number)
            _check(name, own_tensors, update.tensors)
            targets += own_tensors.values()
            sources += [update.tensors[key].detach() for key in own_tensors]
        torch._foreach_copy_(targets, sources)
        if len(self.names) > 1 and not (self._a.isfinite().all() & self._b.isfinite().all()):
            raise _misfit("numbers that are not finite", "they would reach the rows of every adapter")
        if self.spec.use_dora:
            self._scale()
        for product in self.products:
            product.refresh()
        self._ready = True

    def _tensors(self, number: int) -> dict[str, Tensor]:
        """Our tensors of an adapter by their names in an update."""
        if number in self._named:
            return self._named[number]
        tensors = self._named[number] = {}
        for factors in self.layers.values():
            tensors[factors.prefix + A], tensors[factors.prefix + B] = factors.of(number)
            if self.spec.use_dora:
                key = factors.prefix + MAGNITUDE
                tensors[key] = self._magnitudes.setdefault((key, number), torch.empty(factors.layer.out_features))
        return tensors

    def _scale(self) -> None:
        """What DoRA multiplies outputs by: magnitude / norm of each row of W + scaling B A."""
        for factors in self.layers.values():
            assert factors.scale is not None
            for number in range(len(self.names)):
                norm = delta(*factors.of(number), self.scaling).add_(factors.layer.weight).norm(dim=1)
                magnitude = self._magnitudes[factors.prefix + MAGNITUDE, number]
                factors.scale[1 + number].copy_(magnitude.to(norm.device) / norm)

    def release(self) -> None:
        """Release the memory; the next load must bring all of it."""
        self._a, self._b = self._a.new_empty(0), self._b.new_empty(0)
        for factors in self.layers.values():
            factors.a, factors.b, factors.scale = self._a, self._b, None
        self._ready = False

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Of what is served of these adapters, by ``ADAPTER/NAME``; see `fingerprint.checksums`."""
        tensors = {
            f"{name}/{key}": tensor
            for name in names
            if name in self.names and self._ready
            for key, tensor in self._tensors(self.names.index(name)).items()
        }
        return checksums(tensors, self._dtype)

    def select(self, owners: Tensor | None) -> None:
        """Let the next pass's rows [N] use these adapters by number, or BASE; None: all use the first."""
        self.owners = owners
        if owners is None and len(self.names) == 1:
            self.hidden = None
            return
        self.hidden = self._numbers != (self._numbers[:1] if owners is None else owners)[:, None]


class LowRank:
    """The low-rank products of linear layers over one input, which lie side by side in the output.

    ``norm``: of the layer before, whose weights an input [N, in] lacks.
    """

    def __init__(self, adapters: ServedAdapters, layers: Sequence[Any], norm: Any = None) -> None:
        self._adapters, self._norm = adapters, norm
        self._parts: list[tuple[slice, LayerFactors]] = []
        end = 0
        for layer in layers:
            begin, end = end, end + layer.out_features
            if factors := adapters.layers.get(id(layer)):
                self._parts.append((slice(begin, end), factors))
        self._copy: Tensor | None = None  # of the A, with the norm
        self._a = EMPTY
        self.refresh()
        adapters.products.add(self)

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def scales(self) -> bool:
        """Whether outputs of the base are scaled too (DoRA)."""
        return self._adapters.spec.use_dora and bool(self._parts)

    def refresh(self) -> None:
        """Follow the factors; a copy stays where it is."""
        if not self._parts:
            return
        a = joined([factors.a.flatten(0, 1) for _, factors in self._parts])
        if self._norm is not None:
            a = torch.mul(a, self._norm.weight, out=self._copy)
            self._copy = a
        self._a = a

    def release(self) -> None:
        """Let go of the memory until :meth:`refresh`."""
        self._a, self._copy = EMPTY, None

    def add_to(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add the products of x [N, in] to y [N, sum of out], which is the base's, with its bias; y itself."""
        adapters = self._adapters
        low = F.linear(x, self._a)
        if adapters.hidden is not None:
            shape = len(x), len(self._parts), len(adapters.names), adapters.spec.rank
            low.view(shape).masked_fill_(adapters.hidden[:, None, :, None], 0)
        for (span, factors), part in zip(self._parts, low.chunk(len(self._parts), 1), strict=True):
            out = y[:, span]
            if factors.scale is not None and bias is not None:
                out.sub_(bias[span])
            out.addmm_(part, factors.b.t(), alpha=adapters.scaling)
            if factors.scale is not None:
                out.mul_(factors.scale[1] if adapters.owners is None else factors.scale[adapters.owners + 1])
                if bias is not None:
                    out.add_(bias[span])
        return y


class _Hook:
    """Adds a layer's low-rank product to what it gives as a module."""

    def __init__(self, low: LowRank) -> None:
        self._low = low

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = output.reshape(-1, output.shape[-1])
        return self._low.add_to(rows, inputs[0].reshape(len(rows), -1), layer.bias).view(output.shape)


def _targets(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, torch.nn.Linear]:
    """The layers of an update's tensors by their prefix there, in the order of the model."""
    prefixes = {name.removesuffix(A) for name in tensors if name.endswith(A)}
    by_name = {prefix: prefix for prefix in prefixes} | {text_name(prefix): prefix for prefix in prefixes}
    layers = {
        by_name[name]: module
        for name, module in model.named_modules()
        if name in by_name and isinstance(module, torch.nn.Linear)
    }
    if lacking := sorted(prefixes - layers.keys()):
        raise _misfit(
            f"{len(lacking)} targets that are not linear layers of the model: {', '.join(lacking[:5])}",
            "the embedded engine computes with adapters on linear layers",
        )
    if not layers:
        raise _misfit("no tensor named *.lora_A.weight", f"it has {', '.join([*tensors][:5]) or 'none'}")
    return layers


def _check(adapter: str, own_tensors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    shapes = [
        f"{name} is {list(tensors[name].shape)}, not {list(one.shape)}"
        for name, one in own_tensors.items()
        if name in tensors and tensors[name].shape != one.shape
    ]
    kinds: Iterator[tuple[str, list[str]]] = iter(
        (
            ("missing", [name for name in own_tensors if name not in tensors]),
            ("not known", [name for name in tensors if name not in own_tensors]),
            ("mis-shaped", shapes),
        )
    )
    if parts := [f"{len(names)} {kind}: {', '.join(names[:5])}" for kind, names in kinds if names]:
        raise _misfit(f"tensors of adapter {adapter} that do not fit the model", "; ".join(parts))


def _misfit(what: str, reason: str) -> EngineError:
    return EngineError(
        f"the engine was sent {what}",
        code="ENG86",
        where="the embedded engine",
        why=reason,
        fix="train.lora_sync=merged, or adapters of the model in rollout.hf_checkpoint",
    )
