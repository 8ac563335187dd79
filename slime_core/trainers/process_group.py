"""Trainer ranks meet in a process group: gloo for the CPU and NCCL for GPUs.

on one machine       at a file that all see, over the loopback
on several machines  at tcp://HOST:PORT, which rank 0 has opened, over the network that this address belongs to
"""

from __future__ import annotations

import atexit
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.errors import TrainerError

TCP = "tcp://"
_OPENED: dict[str, Any] = {}  # stores that this process has opened, by address


def join_group(rank: int, world: int, device: str, rendezvous: str | Path | None) -> None:
    """Join the group of all ranks; ``rendezvous`` is a file that all see, or an address, needed for more than one.

    Raises:
        TrainerError: this process already belongs to a group of another size, or there is nowhere to meet.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise TrainerError(
                f"rank {rank} of {world} was requested in a process that is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}",
                fix="one process holds trainers of one world size",
            )
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=_store(world, rendezvous), rank=rank, world_size=world)
    if world == 1:  # NCCL warns of a group at exit; where there are others, leaving may wait for some that are gone
        atexit.register(_leave)


def least(value: int) -> int:
    """The least of all ranks' values; each of them calls it."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def open_rendezvous(host: str, world: int) -> str:
    """Open a place to meet at an address of this machine, on a port that is held from here on; the address of it.

    Example: open_rendezvous("10.0.0.5", 16) == "tcp://10.0.0.5:38211"
    """
    server = socket.create_server((host, 0), backlog=max(world, 128))
    port, fd = int(server.getsockname()[1]), server.detach()
    stores: Any = dist
    store = stores.TCPStore(host, port, world, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    address = f"{TCP}{host}:{port}"
    _OPENED[address] = store
    return address


def _store(world: int, rendezvous: str | Path | None) -> Any:
    stores: Any = dist
    if rendezvous is None and world > 1:
        raise TrainerError(f"{world} ranks need a rendezvous address")
    if str(rendezvous).startswith(TCP):
        address = str(rendezvous)
        host, _, port = address.removeprefix(TCP).rpartition(":")
        if name := _interface_to(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return _OPENED.get(address) or stores.TCPStore(host, int(port), world, is_master=False)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    if loopback:  # ranks that meet in a file are on this machine, and need no name that a resolver knows
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return stores.HashStore() if rendezvous is None else stores.FileStore(str(rendezvous), world)


def _interface_to(host: str) -> str:
    """The interface by which this machine reaches ``host``; empty where that cannot be told."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: the kernel only chooses a route
            address = probe.getsockname()[0]
        except OSError:
            return ""
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(reply) == address:
                return name
    return ""
