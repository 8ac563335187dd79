"""Adapters in a torch_dist folder that a run saved: an adapter folder in peft's format, or merged into their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_convert.bridge import Bridge, Sizes, whole_shape
from slime_convert.folder_writing import Done, How
from slime_convert.rows import parted, read_whole
from slime_convert.saved_adapters import adapter_folder, merged_checkpoint, record_of
from slime_convert.trained_base import AdaptedModel
from slime_core.errors import ConfigError
from slime_core.lora.folder import BaseForm, Factors
from slime_core.weights.build import Fit, misfit
from slime_core.weights.folder import read_config
from slime_megatron.adapter_entries import origins, placed_parts, whole_factors
from slime_megatron.convert.dist import METADATA, DistFolder, Whole
from slime_megatron.convert.dist_keys import ADAPTERS, places

STATE = "trainer.json"  # what a run's trainer writes beside the tensors


@dataclass(slots=True, frozen=True)
class BridgeNames:
    """How a bridge names and cuts the tensors of a model."""

    sizes: Sizes
    parameter_name: Callable[[str], str]


@dataclass(slots=True, frozen=True)
class DistAdapter:
    """A `SavedAdapter` of a run with Megatron."""

    name: str
    config: dict[str, Any]
    base: BaseForm
    folder: DistFolder
    find: Callable[[Any], Bridge]

    @classmethod
    def of(cls, folder: DistFolder, name: str, find: Callable[[Any], Bridge]) -> DistAdapter:
        """Read what a checkpoint says of an adapter, the only one where none is named.

        Raises:
            ConfigError: CFG05 no such adapter, full training, or no record of its rank. Others as ``find``.
        """
        state = read_state(folder.path)
        if has_adapters(folder) and "lora" not in state:
            raise ConfigError(
                f"{folder.path.name} does not say how its adapters adapt",
                code="CFG05",
                where=str(folder.path / STATE),
                why="an older slime wrote it, or it was copied without this file",
                fix="take final/adapter of the run; or resume the run, which saves it anew",
            )
        return cls(*record_of(folder.path, state, name, "dist-to-hf"), folder, find)

    @property
    def files(self) -> set[Path]:
        """Where its tensors lie."""
        names = [key for key in self.folder.tensors if key.startswith(f"{ADAPTERS}{self.name}.")]
        chunks = (chunk.file for key in names for chunk in self.folder.tensors[key].chunks)
        return {*chunks, self.folder.path / METADATA}

    def factors(self, model: AdaptedModel) -> dict[str, Factors]:
        """By weight, in the order of the model.

        Raises:
            DataError: TOK46 they are of another model.
        """
        config = read_config(model.folder)
        bridge = self.find(config)
        naming = BridgeNames(bridge.sizes(config), bridge.parameter_name)
        fit, tensors = Fit(), dict[str, torch.Tensor]()
        parts = [
            one for entry in bridge.entries(config) for one in placed_parts(entry, naming, model.adapters, self.name)
        ]
        for entry in (entry for placed in parts for entry in placed.factors):
            (place,) = places(entry, naming.sizes, bridge.attention, True)
            expected = (*place.of, *whole_shape(entry, naming.sizes))
            stored = self.folder.tensors.get(place.key)
            if stored is None:
                fit.missing.append(place.key)
            elif stored.shape != expected:
                fit.shapes.append((place.key, stored.shape, expected))
            else:
                (rows,) = parted(entry, Whole(self.folder, place.key, place.index), naming.sizes)
                tensors[entry.hf[0]] = read_whole(rows)
        if not fit:
            raise misfit(fit, self.folder.path, str(model.folder / "config.json"))
        return whole_factors(tensors, origins(parts), model.adapters)


def has_adapters(folder: DistFolder) -> bool:
    """Whether a checkpoint is of adapters."""
    return any(key.startswith(ADAPTERS) for key in folder.tensors)


def read_state(path: Path) -> Mapping[str, Any]:
    """What a run's trainer stored beside the tensors; nothing where another program wrote the folder."""
    file = path / STATE
    state: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return state


def dist_to_adapter(
    source: Path, target: Path, base: Path, find: Callable[[Any], Bridge], how: How, adapter: str, *, trusted: bool
) -> Done:
    """Write one of the adapters of a run's checkpoint as an adapter folder in peft's format.

    Raises:
        ConfigError: CFG05 no such adapter, or full training. DataError: TOK46, TOK201 to TOK203.
    """
    folder = DistFolder.open(source, trusted=trusted)
    return adapter_folder("dist-to-adapter", DistAdapter.of(folder, adapter, find), target, base, how)


def merged_dist(
    folder: DistFolder, target: Path, base: Path, find: Callable[[Any], Bridge], how: How, adapter: str, form: str
) -> Done:
    """Write a model folder of the base with one of the adapters; as `merged_checkpoint`."""
    saved = DistAdapter.of(folder, adapter, find)
    return merged_checkpoint("dist-to-hf", saved, folder.path, target, base, how, form)
