"""Merge an adapter folder in peft's format into its base model, tensor by tensor; no model with weights is built.

base tensors --> as they are, or as the adapter's run held them in 4 or 8 bits
adapted ones --> `lora.layers.merged`: in float32, rounded once --> shards, index, config, tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_convert.folder_writing import Done, How, to_hf
from slime_convert.rows import TensorRows, cast, read_whole
from slime_convert.trained_base import AdaptedModel, TrainedBase
from slime_core.errors import ConfigError
from slime_core.lora.folder import CONFIG, WEIGHTS, Factors, factors_of, read_base_form, read_factors, read_spec
from slime_core.lora.layers import merged
from slime_core.lora.spec import DEFAULT
from slime_core.weights.folder import resolve
from slime_core.weights.transports.buckets import TensorPart

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


def adapter_to_hf(adapter: Path, target: Path, base: Path | None, how: How, form: str = "") -> Done:
    """Write the model folder that an adapter folder makes of its base.

    Args:
        base: the base model's folder; None takes the one that the adapter names
        form: of the base that it is merged into, as `train.base_weights`; empty: that it was trained on

    Raises:
        ConfigError: CFG05 no adapter, or no base. DataError: TOK46 the adapter is not of this base; others of
            `read_spec` and `read_factors`.
    """
    spec = read_spec(adapter, f"command line: {WORD}")
    folder = base if base is not None else _base_of(adapter)
    model = AdaptedModel.of(folder, spec)
    factors = read_factors(adapter, factors_of(model.adapters, DEFAULT))
    trained_on = read_base_form(adapter)
    if not (form or trained_on.form):
        how.note(
            f"{adapter} does not say what base it was trained on: it is merged into the weights as {folder} has them; "
            "where it was trained on 4 or 8 bits: --base-weights nf4   or   --base-weights fp8"
        )
    dtype = getattr(torch, trained_on.dtype) if trained_on.dtype else None
    trained = TrainedBase(model, form or trained_on.form or "auto", dtype, how.workers)
    return merge("adapter-to-hf", trained, factors, {adapter / CONFIG, adapter / WEIGHTS}, target, how)


def merge(
    kind: str, base: TrainedBase, factors: Mapping[str, Factors], used: set[Path], target: Path, how: How
) -> Done:
    """Write a base with these factors; ``used`` are the files that they come from."""
    model, tensors = base.model, base.rows()
    weights = model.adapters.weights()
    for weight, one in factors.items():
        module, key = weights[weight]
        turned, shape = bool(getattr(module, "is_transposed", False)), module.get_parameter(key).shape
        for name, part in base.places(weight):
            of_part = one if part.shape == shape else _factors_of(part, one)
            dtype = how.torch_dtype or tensors[name].dtype
            tensors[name] = MergedRows(tensors[name], of_part, model.adapters.spec.scaling, dtype, transposed=turned)
    rows = [cast(one, how.torch_dtype) for one in tensors.values()]
    return to_hf(kind, rows, target, model.folder, used | {info.file for info in base.shards.infos.values()}, how)


def _factors_of(part: TensorPart, factors: Factors) -> Factors:
    """Of the matrix of one expert, of a stack's."""
    experts, out, _ = factors.b.shape
    expert = int(part.cut(torch.arange(experts * out).view(experts, out, 1))[0]) // out
    return Factors(factors.a[expert], part.cut(factors.b))


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
