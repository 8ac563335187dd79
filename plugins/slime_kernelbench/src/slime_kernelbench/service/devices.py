"""Which devices there are to judge on: GPUs by UUID, or places on the processor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core import ConfigError

QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
SECONDS = 30


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """Where one worker judges, one candidate at a time.

    Example: Device(name="GPU-1b2c...", gpu="GPU-1b2c..."), Device(name="cpu-0")
    """

    name: str
    gpu: str = ""  # its UUID

    def environment(self) -> dict[str, str]:
        """What a worker's process gets: a UUID names the same device whatever this process sees as number 0."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu}


def devices(gpus: Sequence[str], workers: int) -> list[Device]:
    """A device for each GPU named, by UUID or index; ``workers`` places on the processor where none is named.

    Raises:
        ConfigError: CFG04 no such GPU, CFG07 one is named twice.
    """
    if not gpus:
        return [Device(name=f"cpu-{number}") for number in range(workers)]
    by_index = list_gpus()
    uuids = [by_index.get(gpu, gpu if gpu in by_index.values() else "") for gpu in gpus]
    for name, uuid in zip(gpus, uuids):
        if not uuid:
            raise ConfigError(
                f"there is no GPU {name!r} here",
                code="CFG04",
                where="--gpus",
                why=f"nvidia-smi lists {', '.join(f'{index}: {uuid}' for index, uuid in by_index.items()) or 'none'}",
                fix="name one of these by number or UUID, or: --gpus none",
            )
    if len(set(uuids)) < len(uuids):
        raise ConfigError(
            "a GPU is named twice", code="CFG07", where="--gpus", why="a device judges one candidate at a time"
        )
    return [Device(name=uuid, gpu=uuid) for uuid in uuids]


def list_gpus(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """UUIDs by index as nvidia-smi counts, of what CUDA_VISIBLE_DEVICES leaves; none where there is no driver."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return visible(done.stdout, environ.get("CUDA_VISIBLE_DEVICES"))


def visible(listing: str, mask: str | None) -> dict[str, str]:
    """The rows of a listing that a mask leaves: numbers are nvidia-smi's, a UUID may be cut short.

    Example: visible("0, GPU-aa\\n1, GPU-bb\\n", "1") == {"1": "GPU-bb"}
    """
    rows = [line.split(",") for line in listing.splitlines() if line.count(",") == 1]
    by_index = {index.strip(): uuid.strip() for index, uuid in rows}
    if mask is None:
        return by_index
    words = [word.strip() for word in mask.split(",") if word.strip()]
    return {
        i: u for i, u in by_index.items() if any(word == i or (len(word) > 4 and u.startswith(word)) for word in words)
    }
