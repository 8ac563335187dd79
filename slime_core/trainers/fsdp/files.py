"""Training state to and from a folder: safetensors by parameter name, and JSON. One layout for any number of ranks.

parameters.safetensors   moments.safetensors (moment1.NAME, moment2.NAME)   reference.safetensors   trainer.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import StorageError, TrainerError
from slime_core.trainers.fsdp.sharding import full, like, own_part

FORMAT = 1
PARAMETERS, MOMENTS, REFERENCE, STATE = (
    "parameters.safetensors",
    "moments.safetensors",
    "reference.safetensors",
    "trainer.json",
)
Tensors = dict[str, torch.Tensor]


def write_shards(path: Path, shards: Mapping[str, torch.Tensor], of: Callable[[str], torch.Tensor], rank: int) -> None:
    """Gather every rank's shards and let rank 0 write them; ``of`` names the parameter that a shard is cut like.

    Raises:
        StorageError: the file cannot be written.
    """
    whole: Tensors = {}
    for name, tensor in shards.items():
        gathered = full(like(tensor, of(name))).detach()
        if rank == 0:
            whole[name] = gathered.cpu().contiguous()
    if rank == 0:
        try:
            save_file(whole, str(path))
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path.name} cannot be written", where=str(path), why=str(error)) from error


def read_shards(path: Path, of: Callable[[str], torch.Tensor]) -> Tensors:
    """This rank's part of every tensor in a file.

    Raises:
        StorageError: the file is missing or damaged.
        TrainerError: TRN108 a tensor of another shape than its parameter.
    """
    found: Tensors = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                whole, parameter = file.get_tensor(name), of(name)
                if whole.shape != parameter.shape:
                    raise TrainerError(
                        f"{name} is {list(whole.shape)} in the checkpoint and {list(parameter.shape)} in the model",
                        code="TRN108",
                        where=str(path),
                        fix="resume with the model folder that the run started from",
                    )
                found[name] = own_part(whole, parameter).clone()
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    return found


def write_folder(path: Path, hf: Any, whole: Tensors, tokenizer: Any) -> None:
    """A Hugging Face folder: config, model.safetensors, tokenizer; tied tensors once. Prints nothing.

    Raises:
        StorageError: it cannot be written.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        path.mkdir(parents=True, exist_ok=True)
        hf.save_pretrained(str(path), state_dict=whole)
        tokenizer.save_pretrained(str(path))
    except OSError as error:
        raise StorageError("the model folder cannot be written", where=str(path), why=str(error)) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write trainer.json."""
    path.write_text(json.dumps({"format": FORMAT, **state}, indent=2) + "\n")


def read_state(path: Path) -> dict[str, Any]:
    """Read trainer.json.

    Raises:
        StorageError: it is missing, damaged, or of another format.
    """
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    if state.get("format") != FORMAT:
        raise StorageError(f"{path.name} has format {state.get('format')}, not {FORMAT}", where=str(path))
    return state
