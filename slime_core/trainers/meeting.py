"""Trainer ranks meet: a process group over a file that all see, gloo for the CPU and NCCL for GPUs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.errors import TrainerError


def meet(rank: int, world: int, device: str, rendezvous: str | Path | None) -> None:
    """Join the group of all ranks; ``rendezvous`` is a file that all see, needed for more than one.

    Raises:
        TrainerError: this process already belongs to a group of another size, or there is nowhere to meet.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise TrainerError(
                f"rank {rank} of {world} was asked for in a process that is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}",
                fix="one process holds trainers of one world size",
            )
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=_store(world, rendezvous), rank=rank, world_size=world)


def _store(world: int, rendezvous: str | Path | None) -> Any:
    if rendezvous is None and world > 1:
        raise TrainerError(f"{world} ranks need a rendezvous file")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    if loopback:  # ranks that meet in a file are on this machine, and need no name that a resolver knows
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    stores: Any = dist
    return stores.HashStore() if rendezvous is None else stores.FileStore(str(rendezvous), world)
