"""One process group of trainer rank 0 and all ranks of all servers: buckets are broadcast into the engines.

    publish: fill the staging, start a thread, return          load (engine side): init group once, a POST a bucket
    thread:  join the group, broadcast bucket after bucket <== both watch one key of the group's store ==>

SGLang joins with ``torch.distributed``'s own prefixes on a TCPStore; the same are put together here by hand, so that
the group is known to nobody else in this process: FSDP's default group, its names and counters stay as they are.

Neither side waits for the other for ever: there is a deadline, and whoever fails writes why into the store, where the
other finds it within a blink. A group that failed is not used again: the engine asks for another by name. So it does
when the servers change, and what this side has of the group before (communicators, buffers, threads) is given back.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import Bucket, Staging, Stream, Tally, lay_out

if TYPE_CHECKING:
    from slime_core.types import WeightRoute
    from slime_core.weights.transports.buckets import TensorPart

POLL = 0.02  # seconds between looks at the store while a transfer runs
SPIN = 0.0002  # seconds between looks at a broadcast
SPARE = 2 << 30  # bytes of GPU memory that a staging leaves free
JOIN = 120.0  # seconds for gloo ranks to find each other, once one of them is there
Store = Any  # torch.distributed's; its types are not public


def indexed(device: torch.device) -> torch.device:
    """``cuda`` with its number: a process group is of one device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def backend(device: torch.device) -> str:
    """Of the group: nccl, or gloo where weights lie on a CPU."""
    return "nccl" if device.type == "cuda" else "gloo"


def failure_key(group: str, number: int) -> str:
    """Under which either side says why update ``number`` of a group failed."""
    return f"slime/{group}/{number}/failed"


def open_store(address: str, *, timeout: float) -> Store:
    """The store of a group, as a client of it.

    Raises:
        RuntimeError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=timeout)
    names: Any = dist
    return names.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)


def failure_reason(store: Store, key: str) -> str:
    """Why an update failed; empty while nobody says that it did, or where the store is gone."""
    with suppress(RuntimeError):
        if store.check([key]):
            return str(store.get(key).decode())
    return ""


def tell(store: Store, key: str, why: str) -> None:
    """Say why an update failed, unless somebody has said it before."""
    with suppress(RuntimeError):
        store.compare_set(key, "", why)


@dataclass(slots=True)
class TransferGroup:
    """A group as rank 0 holds it."""

    name: str
    world: int
    store: Store
    address: str
    side: Store  # a connection of its own to the same store: whoever waits for a key holds the other
    process_group: Any = None  # from the first broadcast on
    updates: int = 0
    failed: str = ""


@dataclass(slots=True)
class Transfer:
    """One update under way: ``done`` is set when every rank has every bucket, or when it failed."""

    group: TransferGroup
    number: int
    deadline: float  # of time.monotonic()
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class BroadcastSender:
    """Rank 0 of the group.

    Example:
        handle = BroadcastSender(device).send(parts, stream(sources), 4, route, tally)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = indexed(device)
        self._staging: Staging | None = None
        self._group: TransferGroup | None = None
        self._transfer: Transfer | None = None
        self._stores: list[Store] = []  # of groups before: servers' ranks look there as long as they live

    def send(
        self, parts: list[TensorPart], tensors: Stream, version: int, route: WeightRoute, tally: Tally
    ) -> dict[str, Any]:
        """``{"buckets", "group", "address", "world", "backend", "number", "join"}``.

        ``join``: servers have to join the group first.

        Raises:
            TrainerError: TRN00 the address cannot be listened on, or the group has failed before.
        """
        self._settle()
        buckets = lay_out(parts, route.dtype, route.buffer_bytes)
        if self._staging is None or self._staging.buckets != buckets:
            self._staging = None
            self._staging = Staging(buckets, self._allocator(sum(bucket.size for bucket in buckets)))
        self._staging.fill(tensors)
        tally.add_all(self._staging.views)
        group = self._joined(route)
        join = group.process_group is None
        group.updates += 1
        transfer = Transfer(group, group.updates, time.monotonic() + route.timeout)
        self._transfer = transfer
        for target in (self._run, _watch):
            threading.Thread(target=target, args=(transfer,), name="weights", daemon=True).start()
        return {
            "buckets": [bucket.described() for bucket in buckets],
            "group": group.name,
            "address": group.address,
            "world": group.world,
            "backend": backend(self._device),
            "number": transfer.number,
            "join": join,
        }

    def drop(self) -> None:
        """Give the staging's memory back, when the transfer that reads it is over."""
        self._settle()
        self._staging = None

    def _settle(self) -> None:
        """Wait for the transfer before, which ends at its deadline at the latest."""
        if self._transfer is not None:
            self._transfer.done.wait()
            self._transfer = None

    def _allocator(self, size: int) -> Any:
        """On the GPU where all of it fits beside what is there; else in locked host memory."""
        if self._device.type != "cuda":
            return lambda count: torch.empty(count, dtype=torch.uint8)
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if size + SPARE < free + cached:
            return lambda count: torch.empty(count, dtype=torch.uint8, device=self._device)
        return lambda count: torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def _joined(self, route: WeightRoute) -> TransferGroup:
        group = self._group
        if group is None or (group.name, group.world) != (route.group, route.world):
            if group is not None:
                self._stores.append(group.store)
                threading.Thread(target=_destroy, args=(group,), name="weights", daemon=True).start()
            self._group = group = TransferGroup(route.group, route.world, *_listen(route))
        elif group.failed:
            raise TrainerError(
                f"the process group {group.name} is broken",
                where=group.address,
                why=group.failed,
                fix="the engine has to name a new group",
            )
        return group

    def _run(self, transfer: Transfer) -> None:
        """On a thread of its own: what blocks here is left behind when the watch gives up."""
        group = transfer.group
        try:
            if group.process_group is None:
                if self._device.type != "cuda" and not _gathered(transfer):
                    return
                group.process_group = connect(group, backend(self._device), transfer.deadline - time.monotonic())
            assert self._staging is not None
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for bucket, flat in zip(self._staging.buckets, self._staging.flats, strict=True):
                self._broadcast(transfer, bucket, flat)
        except Exception as error:
            _fail(transfer, f"trainer rank 0: {type(error).__name__}: {str(error).splitlines()[0]}")
        transfer.done.set()

    def _broadcast(self, transfer: Transfer, bucket: Bucket, flat: torch.Tensor) -> None:
        sent = flat.to(self._device, non_blocking=True)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = transfer.group.process_group.broadcast([sent], options)
        while not work.is_completed():
            if transfer.done.is_set():
                return
            time.sleep(SPIN)
        work.wait()
        if sent.is_cuda:  # is_completed of NCCL is the kernel's end; wait only orders streams
            torch.cuda.synchronize(self._device)


def _listen(route: WeightRoute) -> tuple[Store, str, Store]:
    """A store on a socket that is bound to the route's address alone; port 0: a free one."""
    host, _, port = route.address.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), int(port)))
        sock.listen(1024)
    except (OSError, ValueError) as error:
        sock.close()
        raise TrainerError(
            "the trainer cannot listen for the servers that take weights",
            where=route.address,
            why=str(error),
            fix="set rollout.update_weight_transport=disk, or free the port",
        ) from error
    open_port = sock.getsockname()[1]
    names: Any = dist
    store = names.TCPStore(
        host.strip("[]"),
        open_port,
        route.world,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=route.timeout),
        multi_tenant=True,
        master_listen_fd=sock.detach(),
    )
    return store, f"{host}:{open_port}", open_store(f"{host}:{open_port}", timeout=route.timeout)


def _prefixed(store: Store, group: str, kind: str) -> Store:
    """The keys that `torch.distributed` uses for a group of this name."""
    names: Any = dist
    device = "cuda" if kind == "nccl" else "cpu"  # the first that the backend serves
    return names.PrefixStore(f"{device}/", names.PrefixStore(f"{group}/", names.PrefixStore(group, store)))


def _gathered(transfer: Transfer) -> bool:
    """Wait until all ranks wait for this one: making a gloo group blocks, and nothing could call it back.

    After half of the time that ranks have for it, the group is made anyway: the keys are gloo's own affair.
    """
    group, until = transfer.group, time.monotonic() + JOIN / 2
    store = _prefixed(group.side, group.name, "gloo")
    while not store.check([f"0/{rank}" for rank in range(1, group.world)]) and time.monotonic() < until:
        if transfer.done.wait(POLL):
            return False
    return True


def connect(group: TransferGroup, kind: str, seconds: float, rank: int = 0) -> Any:
    """A backend that is not known to the rest of this process; gloo's waits for all ranks."""
    names: Any = dist
    store = _prefixed(group.store, group.name, kind)
    if kind == "nccl":
        options = names.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(0.001, seconds))
        options.group_name = group.name
        return names.ProcessGroupNCCL(store, rank, group.world, options)
    return names.ProcessGroupGloo(store, rank, group.world, timedelta(seconds=max(0.001, min(seconds, JOIN))))


def _destroy(group: TransferGroup) -> None:
    """Give a group's memory and connections back, on a thread of its own: a group may wait for peers that are gone."""
    ended, group.process_group = group.process_group, None
    if ended is not None:
        with suppress(Exception):
            ended.abort()


def _watch(transfer: Transfer) -> None:
    """End a transfer that its servers gave up, or whose time is over."""
    key = failure_key(transfer.group.name, transfer.number)
    while not transfer.done.wait(POLL):
        reason = failure_reason(transfer.group.side, key)
        if not reason and time.monotonic() > transfer.deadline:
            reason = "trainer rank 0: the servers' ranks did not take the weights in time"
        if reason:
            _fail(transfer, reason)
            transfer.done.set()
            with suppress(Exception):
                if transfer.group.process_group is not None:
                    transfer.group.process_group.abort()


def _fail(transfer: Transfer, why: str) -> None:
    """Tell the other side, unless it has told first."""
    if transfer.done.is_set():
        return
    transfer.error = transfer.group.failed = why
    tell(transfer.group.side, failure_key(transfer.group.name, transfer.number), why)
