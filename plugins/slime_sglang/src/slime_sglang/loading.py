"""One server takes one update: the calls that the engine's side of each transport makes, and what may go wrong.

    disk    the folder is looked through here first (a server that fails to read it rolls back to it, and dies)
    tensor  one call with the handles, the same for each tensor-parallel rank
    nccl    join the group once, then a call a bucket, while the trainer's rank 0 broadcasts

SGLang 0.5.23 wants ``tensor`` and ``nccl`` between two calls of their own, which are made where it has them. The last
call of an update carries the version, so a server that got a part of it keeps the old stamp; it has to be restarted.
Adapters, of an update that has them, come after the base, or alone: `adapter_updates`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError, SlimeError
from slime_core.weights.shards import Shards
from slime_sglang.adapter_updates import update_adapters

if TYPE_CHECKING:
    from slime_core.types import WeightUpdate
    from slime_sglang.client import Client

BEGIN, END = "/begin_weight_update", "/end_weight_update"
POLL = 0.05  # seconds between looks for what the trainer's side says
GRACE = 1.0  # seconds in which the side that failed first may have told why


@dataclass(slots=True, frozen=True)
class Target:
    """A server and what is known of this update there."""

    client: Client
    update: WeightUpdate
    deadline: float  # of time.monotonic()
    flush: bool
    ranks: int
    first_rank: int
    trainers: tuple[int, ...] = ()

    @property
    def remaining(self) -> float:
        """Seconds."""
        return max(0.001, self.deadline - time.monotonic())

    def handles(self, sent: Mapping[str, Any]) -> list[list[str]]:
        """Of each bucket the memory that each rank of the server reads."""
        buckets, copies = sent["buckets"], sent.get("copies", {})
        near = [copies.get(str(trainer), buckets) for trainer in self.trainers] or [buckets] * self.ranks
        return [[payload[number]["handle"] for payload in near] for number in range(len(buckets))]

    async def post(self, path: str, body: dict[str, Any], *, last: bool) -> None:
        """One call of the update.

        Raises:
            EngineError: ENG86 the server refuses, with its message; ENG83 it stamps another version.
            ServerFault: it does not answer.
        """
        text = self.client.version_text(self.update.version)
        stamp = {"weight_version": text} if last else {}
        flush = {"flush_cache": self.flush and last, "abort_all_requests": False, "torch_empty_cache": False}
        answer = await self.call(path, body | flush | stamp)
        message = str(answer.get("message", ""))
        if last and f"Weight version updated to {text}." not in message:
            raise EngineError(
                f"{self.name} took version {self.update.version} and does not say that it serves it",
                code="ENG83",
                where=self.where,
                why=f"its answer: {message or answer}",
                fix="this version of SGLang stamps no versions: use a newer one",
            )

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST; what the server answers with 4xx, or as no success, is ENG86."""
        try:
            answer = await self.client.post(path, body, timeout=self.remaining)
        except EngineError as error:
            if error.code != "ENG78":
                raise
            raise self.refused(error.why or error.what) from error
        if answer.get("success") is False:
            raise self.refused(str(answer.get("message", answer)))
        return answer

    def refused(self, why: str) -> EngineError:
        """ENG86."""
        return EngineError(
            f"{self.name} did not take version {self.update.version} by {self.update.transport}",
            code="ENG86",
            where=self.where,
            why=why,
            fix="the server's log says more; rollout.update_weight_transport chooses another way",
        )

    @property
    def name(self) -> str:
        """For a message."""
        return f"server {self.client.address.number}"

    @property
    def where(self) -> str:
        """For a message."""
        return self.client.address.url


async def load(
    client: Client,
    update: WeightUpdate,
    *,
    timeout: float,
    flush: bool,
    ranks: int = 1,
    first_rank: int = 1,
    trainers: Sequence[int] = (),
) -> None:
    """Bring an update that ``publish`` started into one server, and have it stamp ``client.version_text(version)``.

    Args:
        client: of the server, which is paused or idle.
        update: with the handle of its transport.
        timeout: seconds for all of it.
        flush: drop the cache that the old weights made; refused by a server that still runs requests.
        ranks: tensor-parallel ranks of the server.
        first_rank: nccl: number of the server's first rank in the group; the trainer is 0, servers follow one another.
        trainers: tensor: the trainer's rank on the GPU of each rank; empty: all read the memory of rank 0.

    Raises:
        EngineError: ENG86 the server refuses, or the update is damaged or broke off; ENG83 another version is stamped.
            The server may hold a part of the update: fence it.
        ServerFault: it does not answer.
    """
    to = Target(client, update, time.monotonic() + timeout, flush, ranks, first_rank, tuple(trainers))
    if has_base(update):
        await _load_base(to)
    if adapters := update.handle.get("adapters"):
        await update_adapters(to, adapters)


def has_base(update: WeightUpdate) -> bool:
    """Whether an update has the model's own tensors, not adapters alone."""
    return set(update.handle or ()) != {"adapters"}


async def _load_base(to: Target) -> None:
    update = to.update
    if update.transport == "disk":
        await _from_disk(to)
    elif update.transport == "tensor":
        await _bracketed(to, _from_tensor(to))
    elif update.transport == "nccl":
        await _watched(to)
    else:
        raise to.refused(f"SGLang has no transport {update.transport}")


async def _from_disk(to: Target) -> None:
    folder = str(to.update.handle["folder"])
    try:
        await asyncio.to_thread(Shards.open, Path(folder))
    except (SlimeError, OSError) as error:
        raise to.refused(f"{folder} cannot be read: {error}") from error
    await to.post("/update_weights_from_disk", {"model_path": folder, "load_format": "auto"}, last=True)


async def _from_tensor(to: Target) -> None:
    handles = to.handles(to.update.handle)
    for number, payload in enumerate(handles, 1):
        body = {"serialized_named_tensors": payload, "load_format": "flattened_bucket"}
        await to.post("/update_weights_from_tensor", body, last=number == len(handles))


async def _from_group(to: Target) -> None:
    handle = to.update.handle
    buckets = handle["buckets"]
    for number, bucket in enumerate(buckets, 1):
        body = {name: bucket[name] for name in ("names", "dtypes", "shapes")}
        body |= {"group_name": handle["group"], "load_format": "flattened_bucket"}
        await to.post("/update_weights_from_distributed", body, last=number == len(buckets))


async def _bracketed(to: Target, work: Any) -> None:
    """Inside the two calls that a newer SGLang wants around an update; the second is made whatever happened."""
    if "update_brackets" not in to.client.features:
        await work
        return
    try:
        await to.call(BEGIN, {})
    except EngineError as error:
        if error.code != "ENG86":
            work.close()
            raise
        try:  # an update that broke off left it open
            await to.call(END, {})
            await to.call(BEGIN, {})
        except BaseException:
            work.close()
            raise
    try:
        await work
    except EngineError:
        with suppress(EngineError):
            await to.call(END, {})
        raise
    await to.call(END, {})


async def _joined(to: Target) -> None:
    handle = to.update.handle
    if handle["join"]:
        host, _, port = handle["address"].rpartition(":")
        body = {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": to.first_rank,
            "world_size": handle["world"],
            "group_name": handle["group"],
            "backend": handle["backend"],
        }
        await to.call("/init_weights_update_group", body)
    await _bracketed(to, _from_group(to))


async def _watched(to: Target) -> None:
    """Take a broadcast, with an eye on the group's store: whoever fails first says why there, and all others stop."""
    from slime_sglang.senders import nccl

    handle: Mapping[str, Any] = to.update.handle
    key = nccl.failure_key(handle["group"], handle["number"])
    try:
        store = await asyncio.to_thread(nccl.open_store, handle["address"], timeout=min(to.remaining, 30.0))
    except RuntimeError as error:
        raise to.refused(f"the trainer's store at {handle['address']} does not answer: {error}") from error
    work = asyncio.ensure_future(_joined(to))
    watch = asyncio.ensure_future(_failure_reason(store, key))
    try:
        await asyncio.wait({work, watch}, timeout=to.remaining, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not work.cancelled() and work.exception() is None:
            return
        if work.done() and not watch.done():  # this server failed: by itself, or since the trainer did just now
            await asyncio.wait({watch}, timeout=GRACE)
        failure = work.exception() if work.done() else None
        reason = watch.result() if watch.done() else ""
        if not reason:
            reason = f"{to.name}: {_reason(failure)}" if failure else f"{to.name}: it did not take the weights in time"
            await asyncio.to_thread(nccl.tell, store, key, reason)
            if failure is not None:
                raise failure
        raise to.refused(reason) from failure
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _failure_reason(store: Any, key: str) -> str:
    """What the store says of a failure, once it says something."""
    from slime_sglang.senders import nccl

    while True:
        reason = await asyncio.to_thread(nccl.failure_reason, store, key)
        if reason:
            return reason
        await asyncio.sleep(POLL)


def _reason(error: BaseException) -> str:
    return (error.why or error.what) if isinstance(error, SlimeError) else f"{type(error).__name__}: {error}"
