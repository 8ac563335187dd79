"""Merge an adapter folder in peft's format into its base model, tensor by tensor; no model with weights is built.

base tensors --> as they are
adapted ones --> `lora.layers.merged`: in float32, rounded once --> shards, index, config, tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_convert.folder_writing import Done, How, to_hf
from slime_convert.rows import StoredRows, TensorRows, cast, read_whole
from slime_core.errors import ConfigError, DataError
from slime_core.lora.folder import CONFIG, WEIGHTS, Factors, factors_of, read_factors, read_spec
from slime_core.lora.layers import Adapters, attach, merged
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.trainers.fsdp.adapters import outside_of
from slime_core.weights.build import skeleton
from slime_core.weights.folder import read_config, resolve
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.shards import Shards

WORD = "slime convert adapter-to-hf"


@dataclass(slots=True)
class MergedRows:
    """A tensor of the base with its adapter; in memory from its first row to its last."""

    base: TensorRows
    factors: Factors
    scaling: float
    dtype: torch.dtype
    transposed: bool = False  # matrices of experts are [in, out]
    _whole: torch.Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """As in `TensorRows`."""
        return self.base.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As in `TensorRows`."""
        return self.base.shape

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`."""
        whole = self._whole if self._whole is not None else self._merged()
        torch.frombuffer(into, dtype=self.dtype).copy_(whole[first : first + count].reshape(-1))
        self._whole = whole if first + count < self.shape[0] else None

    def _merged(self) -> torch.Tensor:
        weight, one = read_whole(self.base), self.factors
        if self.transposed:
            weight = weight.transpose(1, 2)
        whole = merged(weight, one.a, one.b, self.scaling, one.magnitude, dtype=self.dtype)
        return whole.transpose(1, 2) if self.transposed else whole


def adapter_to_hf(adapter: Path, target: Path, base: Path | None, how: How) -> Done:
    """Write the model folder that an adapter folder makes of its base.

    Args:
        base: the base model's folder; None takes the one that the adapter names

    Raises:
        ConfigError: CFG05 no adapter, or no base. DataError: TOK46 the adapter is not of this base; others of
            `read_spec` and `read_factors`.
    """
    spec = read_spec(adapter, f"command line: {WORD}")
    folder = base if base is not None else _base_of(adapter)
    model = AdaptedModel.of(folder, spec)
    used = {adapter / CONFIG, adapter / WEIGHTS}
    return merge("adapter-to-hf", model, read_factors(adapter, factors_of(model.adapters, DEFAULT)), used, target, how)


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


def merge(
    kind: str, model: AdaptedModel, factors: Mapping[str, Factors], used: set[Path], target: Path, how: How
) -> Done:
    """Write a base with these factors; ``used`` are the files that they come from."""
    weights = model.adapters.weights()
    infos = Shards.open(model.folder).infos
    tensors: dict[str, TensorRows] = {name: StoredRows(info) for name, info in infos.items()}
    layout = FolderLayout(model.hf)
    for weight, one in factors.items():
        module, key = weights[weight]
        turned, shape = bool(getattr(module, "is_transposed", False)), module.get_parameter(key).shape
        for name, part in _parts(layout, weight, shape, one, tensors, model.folder):
            dtype = how.torch_dtype or tensors[name].dtype
            tensors[name] = MergedRows(tensors[name], part, model.adapters.spec.scaling, dtype, transposed=turned)
    rows = [cast(one, how.torch_dtype) for one in tensors.values()]
    return to_hf(kind, rows, target, model.folder, used | {info.file for info in infos.values()}, how)


def _parts(
    layout: FolderLayout,
    weight: str,
    shape: torch.Size,
    factors: Factors,
    tensors: Mapping[str, TensorRows],
    folder: Path,
) -> Iterator[tuple[str, Factors]]:
    """The tensors that a weight is in the base's folder, with the factors of each."""
    for part in layout.parts(weight, shape):
        names = (part.name, part.name.removeprefix(layout.prefix))
        name = next((one for one in names if one in tensors), "")
        if not name or tensors[name].shape != part.shape:
            raise DataError(
                f"{weight}, which the adapter adapts, is not in the base model's folder",
                code="TOK46",
                where=str(folder),
                why=f"it would be {part.name} of shape {list(part.shape)}",
                fix="save the base again with transformers (from_pretrained, then save_pretrained), or name another: "
                "--origin-hf-dir FOLDER",
            )
        if part.shape == shape:
            yield name, factors
            continue
        experts, out, _ = factors.b.shape
        expert = int(part.cut(torch.arange(experts * out).view(experts, out, 1))[0]) // out
        yield name, Factors(factors.a[expert], part.cut(factors.b))


def _base_of(adapter: Path) -> Path:
    """The folder of the base model that an adapter names.

    Raises:
        ConfigError: CFG05 it names none, or one that is not here.
    """
    config: dict[str, Any] = json.loads((adapter / CONFIG).read_bytes())
    named, cause = str(config.get("base_model_name_or_path") or ""), None
    try:
        if named:
            return resolve(named, "base_model_name_or_path")
    except ConfigError as error:
        cause = error
    raise ConfigError(
        f"the adapter's base model {named!r} is not here" if named else "the adapter names no base model",
        code="CFG05",
        where=str(adapter / CONFIG),
        why="the adapter is merged into its weights",
        fix="--origin-hf-dir FOLDER",
    ) from cause
