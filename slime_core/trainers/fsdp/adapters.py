"""Adapters of an FSDP policy: which layers have them, what the base and they make together, and the rows of dropout.

The base is frozen and held once, in the dtype of compute; adapters are float32 parameters, sharded as the others are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime_core.kernels.quantised import QuantisedWeight, dense
from slime_core.lora.base_weights import rounding
from slime_core.lora.dropout import micro_keys
from slime_core.lora.folder import Factors, factors_of, load_adapters, to_peft
from slime_core.lora.layers import Adapters, attach, check_targets
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.media.features import tower
from slime_core.media.positions import MediaLayout
from slime_core.seeds import seed_of
from slime_core.trainers.fsdp.low_rank import lay_side_by_side
from slime_core.trainers.fsdp.shards import full
from slime_core.trainers.optimizer_step import to_device
from slime_core.weights.build import skeleton
from slime_core.weights.loading import moved_to

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.packs import RankPack
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.loading import Put

Tensors = dict[str, torch.Tensor]


def adapt(hf: Any, train: Any, seed: int) -> Adapters | None:
    """Freeze a model of transformers and give it the adapters of the [train] section; None where it has none.

    Raises:
        ConfigError: CFG04, see `layers.attach` and `layers.check_targets`.
        ConfigError, DataError: of ``train.lora_load``, see `lora.folder.load_adapters`.
    """
    spec = LoraSpec.of(train)
    if spec is None:
        return None
    lay_side_by_side(hf.requires_grad_(False))
    adapters = attach(hf, spec, seed=seed, names=train.lora_adapters or (DEFAULT,), outside=outside_of(hf))
    check_targets(hf, adapters, spec)
    if train.lora_load:
        load_adapters(adapters, Path(train.lora_load))
    return adapters


def outside_of(hf: Any) -> Sequence[nn.Module]:
    """Modules of a model of transformers that see pictures, and have no adapters."""
    return tower(hf) if MediaLayout.of(hf.config) is not None else ()


def rounded_on(device: torch.device, folder: ModelFolder, form: str, *, floats: bool = False) -> Put:
    """What takes weights to a device as a folder's model is loaded, those of a base in few bits rounded there.

    Args:
        form: as `train.base_weights`
        floats: hold floats of the rounded values

    Raises:
        ConfigError: CFG04 no weight of the model can be held so.
    """
    if form == "auto":
        return moved_to(device)
    hf: Any = skeleton(folder.config, trust_remote_code=folder.trust_remote_code)
    put = rounding(hf, form, device, folder.tensors() if folder.init_weights == "load" else None, outside_of(hf))
    return (lambda name, tensor: dense(put(name, tensor))) if floats else put


@contextmanager
def trial_values(adapters: Adapters | None) -> Iterator[None]:
    """Adapters have a B inside the block on which every gradient depends; it is 0 at the start."""
    ups = {} if adapters is None else {n: p.data for n, p in adapters.parameters().items() if ".lora_B." in n}
    before = {name: b.clone() for name, b in ups.items()}
    for b in ups.values():
        b.copy_(torch.sin(torch.arange(b.numel(), device=b.device)).view(b.shape) / 10)
    try:
        yield
    finally:
        for name, b in ups.items():
            b.copy_(before[name])


def whole_factors(adapters: Adapters, name: str, *, keep: bool) -> dict[str, Factors]:
    """An adapter's factors on the host; nothing where they are not to ``keep``; a collective."""
    factors = {}
    for weight, one in factors_of(adapters, name).items():
        parts = [full(part.detach()) if part is not None else None for part in (one.a, one.b, one.magnitude)]
        a, b, magnitude = (part.cpu() if part is not None and keep else None for part in parts)
        if a is not None and b is not None:
            factors[weight] = Factors(a, b, magnitude)
    return factors


class MergedWeights:
    """The weights of a model folder by name, those with adapters merged; a merge is a collective.

    Args:
        parameters: of the base by name, in shards
    """

    def __init__(self, adapters: Adapters | None, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self._adapters = adapters
        self._targets = adapters.weights() if adapters is not None and adapters.active is not None else {}

    @torch.no_grad()
    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All ranks' shards of a weight as one tensor, in ``dtype``, the stored one where None."""
        if self._adapters is None or name not in self._targets:
            tensor = dense(full(self.parameters[name])).detach()  # of a DTensor it takes twenty times as long
            return tensor if dtype is None else tensor.to(dtype)
        module, key = self._targets[name]
        assert self._adapters.active is not None
        return module.merged(key, self._adapters.active, dtype, full)

    def changes(self, name: str) -> bool:
        """Whether adapters change a weight."""
        return name in self._targets


@torch.no_grad()
def peft_tensors(adapters: Adapters, name: str) -> Tensors:
    """An adapter's tensors, whole, by peft's names without ``base_model.model.``; a collective."""
    return to_peft({weight: _gathered(factors) for weight, factors in factors_of(adapters, name).items()})


def _gathered(factors: Factors) -> Factors:
    magnitude = None if factors.magnitude is None else full(factors.magnitude)
    return Factors(full(factors.a), full(factors.b), magnitude)


@contextmanager
def dropout(adapters: Adapters | None, pack: RankPack, seed: int, steps: int) -> Iterator[None]:
    """Passes inside the block are of training: inputs of adapters are dropped, by the tokens of the pack's rows."""
    mask = adapters.dropout if adapters is not None else None
    if mask is None or not mask.share:
        yield
        return
    mask.seed = seed_of(seed, "dropout", steps)
    mask.rows = to_device(micro_keys(pack.micro)[pack.rows], pack.device)
    try:
        yield
    finally:
        mask.rows = None


@contextmanager
def without_dropout(adapters: Adapters | None) -> Iterator[None]:
    """Passes inside the block drop nothing, as the slow way does."""
    if adapters is None:
        yield
        return
    share, adapters.dropout.share = adapters.dropout.share, 0.0
    try:
        yield
    finally:
        adapters.dropout.share = share


class ServedWeights:
    """What an engine of the same process reads: the base's own storage, and a copy of what adapters change.

    A weight in fewer bits has a copy too.
    """

    def __init__(self) -> None:
        self._merged: Tensors = {}

    @torch.no_grad()
    def refreshed(self, tensors: Tensors, weights: MergedWeights, adapters: Adapters) -> Tensors:
        """``tensors`` of the model's state without adapters, as they are now; merged ones stay where they are.

        Those of one input lie side by side, as an engine multiplies them.
        """
        learning = adapters.parameters().keys()
        state = {name: tensor for name, tensor in tensors.items() if name not in learning}
        if not self._merged:
            changed = {
                name: tensor
                for name, tensor in state.items()
                if weights.changes(name) or isinstance(tensor, QuantisedWeight)
            }
            sizes, first = [tensor.numel() for tensor in changed.values()], next(iter(changed.values()))
            parts = torch.empty(sum(sizes), dtype=first.dtype, device=first.device).split(sizes)
            self._merged = {name: part.view(state[name].shape) for name, part in zip(changed, parts)}
        for name, merged in self._merged.items():
            merged.copy_(weights.whole(name))
        return state | self._merged

    def tensors(self) -> list[torch.Tensor]:
        """The merged copy."""
        return list(self._merged.values())
