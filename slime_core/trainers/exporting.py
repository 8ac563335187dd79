"""What a trainer writes when a run has ended: a model folder, and of a LoRA run its adapters.

final/   the model; with one adapter the base and it merged, as an engine got it
final/adapter   or adapter/NAME of several, in peft's format
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.lora.folder import BaseForm, write_adapter
from slime_core.lora.spec import LoraSpec
from slime_core.weights.prediction_layers import carry
from slime_core.weights.vision import carry_processor

ADAPTER = "adapter"


def export(worker: Any, path: Path) -> None:
    """Write what ``train.lora_export`` asks for, of full training the model; a collective.

    Args:
        worker: a `trainers.worker.Worker`

    Raises:
        ConfigError: CFG04 the backend writes no adapter folders. StorageError: it cannot be written.
    """
    spec, contents, several = LoraSpec.of(worker.train), worker.train.lora_export, len(worker.train.lora_adapters) > 1
    merges = spec is None or contents == "merged" or (contents == "auto" and not several)
    with worker.offload.loaded({"parameters"}):
        if merges:
            worker.write_folder(path)
        adapters = worker.whole_adapters() if spec is not None and contents != "merged" else {}
    if worker.rank > 0:
        return
    if merges:
        carry_processor(worker.folder.path, path)
        if worker.folder.init_weights == "load":
            carry(worker.folder.path, path, worker.folder.config)
    for name, (config, factors) in adapters.items():
        base = BaseForm(worker.train.base_weights, str(worker.dtype).removeprefix("torch."))
        write_adapter(path / ADAPTER / name if several else path / ADAPTER, config, factors, base)


def no_adapter_folders(backend: str) -> ConfigError:
    """CFG04."""
    return ConfigError(
        f"train_backend = {backend} writes no adapter folders",
        code="CFG04",
        where="train.lora_export",
        fix="--lora-export merged",
    )
