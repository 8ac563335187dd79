"""The base of adapters as their run computed with it: in its dtype, and in 4 or 8 bits where it held weights so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from slime_convert.rows import StoredRows, TensorRows, cast, read_whole
from slime_core.errors import DataError
from slime_core.lora.base_weights import FewBits
from slime_core.lora.layers import Adapters, attach
from slime_core.lora.spec import LoraSpec
from slime_core.trainers.base_checksums import Sums, compare, sums_of
from slime_core.trainers.fsdp.adapters import outside_of
from slime_core.trainers.fsdp.experts import router_biases
from slime_core.weights.build import skeleton
from slime_core.weights.folder import read_config
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import TensorPart

SAME_BASE = "--origin-hf-dir FOLDER   the model folder that the run started from, as it was then"


@dataclass(slots=True, frozen=True)
class AdaptedModel:
    """A base model's folder, and the model with adapters on it, without memory."""

    folder: Path
    hf: Any
    adapters: Adapters

    @classmethod
    def of(cls, folder: Path, spec: LoraSpec) -> AdaptedModel:
        """Raises ConfigError: CFG04 the base has no target."""
        hf = skeleton(read_config(folder))
        return cls(folder, hf, attach(hf, spec, seed=0, outside=outside_of(hf)))


class TrainedBase:
    """The weights of a base.

    Args:
        form: as `train.base_weights`
        dtype: of compute; each tensor's own where None
        cached: weights of many bits that are kept, made of few
    """

    def __init__(
        self, model: AdaptedModel, form: str = "auto", dtype: torch.dtype | None = None, cached: int = 2
    ) -> None:
        self.model, self.dtype = model, dtype
        self.shards = Shards.open(model.folder)
        self._layout = FolderLayout(model.hf)
        outside = outside_of(model.hf)
        self._few_bits = FewBits(model.hf, form, self.shards, outside) if form != "auto" else None
        self.whole = lru_cache(maxsize=cached)(self._whole)

    def rows(self) -> dict[str, TensorRows]:
        """All tensors by their names in the folder."""
        rows = {name: cast(StoredRows(info), self.dtype) for name, info in self.shards.infos.items()}
        for weight in self._few_bits.weights if self._few_bits is not None else ():
            for name, part in self.places(weight):
                rows[name] = TrainedRows(self, weight, part, name, rows[name].dtype)
        return rows

    def places(self, weight: str) -> Sequence[tuple[str, TensorPart]]:
        """The tensors that a weight of the model is in the folder, by their names.

        Raises:
            DataError: TOK46 one is missing, or of another shape.
        """
        parts = self._layout.parts(weight, self.model.hf.state_dict()[weight].shape)
        return [(self._name(weight, part), part) for part in parts]

    def _name(self, weight: str, part: TensorPart) -> str:
        infos = self.shards.infos
        for name in self._layout.names(part.name):
            if name in infos and infos[name].shape == part.shape:
                return name
        raise DataError(
            f"{weight} is not in the base model's folder",
            code="TOK46",
            where=str(self.model.folder),
            why=f"it would be {part.name} of shape {list(part.shape)}",
            fix="save the base again with transformers (from_pretrained, then save_pretrained), or name another: "
            "--origin-hf-dir FOLDER",
        )

    def stored(self, weight: str, dtype: torch.dtype | None) -> torch.Tensor:
        """A weight of the model as the folder has it."""
        places = self.places(weight)
        tensors = [read_whole(cast(StoredRows(self.shards.infos[name]), dtype)) for name, _ in places]
        shape = self.model.hf.state_dict()[weight].shape
        if len(places) == 1:
            return tensors[0].view(shape)
        stack = tensors[0].new_empty(shape)
        for (_, part), tensor in zip(places, tensors):
            part.cut(stack).copy_(tensor)
        return stack

    def _whole(self, weight: str) -> torch.Tensor:
        """A weight of the model as the run computed with it."""
        tensor, few_bits = self.stored(weight, self.dtype), self._few_bits
        if few_bits is None or weight not in few_bits.weights:
            return tensor
        quantised = few_bits.of(weight, tensor, torch.device("cpu"))
        return tensor if quantised is None else quantised.dense()

    def _unrounded(self, weight: str) -> torch.Tensor:
        return self.stored(weight, None)

    def check(self, sums: Sums) -> None:
        """Compare the weights with the checksums that a run took of its base.

        Raises:
            TrainerError: TRN116 it is another base.
        """
        learning, biases = self.model.adapters.parameters(), router_biases(self.model.hf)
        names = [name for name, _ in self.model.hf.named_parameters() if name not in learning]
        now: Sums = {}
        for name in (*names, *biases):
            if name not in sums:
                now[name] = []
                continue
            for tensor in (self._whole, self._unrounded):  # some families keep a tensor in float32, as biases are
                now |= sums_of({name: (tensor(name), 0)}, 1)
                if now[name] == sums[name]:
                    break
        compare(sums, now, str(self.model.folder), SAME_BASE)


@dataclass(slots=True, frozen=True)
class TrainedRows:
    """A tensor of the folder with the values that it had in few bits."""

    base: TrainedBase
    weight: str  # of the model
    part: TensorPart
    name: str
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As in `TensorRows`."""
        return self.part.shape

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`."""
        rows = self.part.cut(self.base.whole(self.weight))[first : first + count]
        torch.frombuffer(into, dtype=self.dtype).copy_(rows.reshape(-1))
