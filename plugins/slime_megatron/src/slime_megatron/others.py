"""Models beside the policy: what of the run's settings is theirs.

[megatron] describes the policy where it describes a model; the layout and everything else of the run is for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slime_megatron.flags import flags
from slime_megatron.settings import MegatronSettings, settings

if TYPE_CHECKING:
    from slime_convert.bridge import Bridge
    from slime_core.config.sections.train import TrainSection
    from slime_core.weights.folder import ModelFolder

UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
"""Flags that fit one number of layers."""
PREDICTION = ("enable_mtp_training", "mtp_loss_scaling_factor")
"""Flags of a layer that predicts further ahead, which only the policy trains."""


@dataclass(slots=True, frozen=True)
class ModelContext:
    """What every model of a rank is made of. ``train`` has a settled dtype."""

    megatron: Mapping[str, Any]
    train: TrainSection
    world: int
    device: torch.device
    layers: int  # of the policy
    bridge: Callable[[Any], Bridge]  # of a folder's config


def settings_of(folder: ModelFolder, bridge: Bridge, run: ModelContext) -> MegatronSettings:
    """Settings of a model of its own.

    Raises:
        ConfigError: CFG04 the layout does not divide it.
    """
    sizes = bridge.sizes(folder.config)
    known_flags = flags()
    table = {name.replace("-", "_"): value for name, value in run.megatron.items()}
    table = {n: v for n, v in table.items() if known_flags[n].role != "model" and n not in PREDICTION}
    if sizes.layers != run.layers:
        table = {name: value for name, value in table.items() if name not in UNEVEN}
    if not sizes.experts:
        table = {name: value for name, value in table.items() if not name.startswith(("expert_", "moe_"))}
    return replace(
        settings(bridge, folder.config, table, run.train, run.world, run.device.type), lora=None, base_weights="auto"
    )
