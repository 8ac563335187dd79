"""How many numbers learn in a run, in words; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import SlimeError
from slime_core.lora.spec import DEFAULT, LoraSpec
from slime_core.weights.folder import parameter_count

if TYPE_CHECKING:
    from slime_core.config.schema import Config


def adapter_numbers(config: Config) -> int:
    """Numbers of all adapters of a run; 0 in full training, or where the model's folder does not say."""
    from slime_core.planning.sizes import ModelSizes

    spec = LoraSpec.of(config.train)
    if spec is None:
        return 0
    try:
        count = ModelSizes.of(Path(config.rollout.hf_checkpoint)).adapter_numbers(spec)
    except (SlimeError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return count * max(1, len(config.train.lora_adapters))


def adapters_line(config: Config) -> str:
    """The adapters of a run, and what part of the parameters they are; empty in full training."""
    spec = LoraSpec.of(config.train)
    if spec is None:
        return ""
    count, base = adapter_numbers(config), parameter_count(Path(config.rollout.hf_checkpoint))
    numbers = f", {count:,} parameters learn beside {base:,}" if count and base else ""
    return f"{', '.join(config.train.lora_adapters or (DEFAULT,))}: rank {spec.rank}{numbers}"
