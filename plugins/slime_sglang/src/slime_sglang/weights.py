"""How weights reach servers, and what is compared afterwards: settings and what servers say of themselves in,
`transfer.WeightRoute` out.

    transport: update_weight_transport; auto: disk on a CPU, where servers share the trainer's GPUs tensor (disk where
               the torch of both sides differs), else nccl
    checks:    names of `/weights_checker` -> layout -> all, or a few in turn
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import EngineError
from slime_core.types import Transport, WeightRoute
from slime_core.weights.canary import Choice
from slime_core.weights.fp8 import SCALE
from slime_core.weights.hashing import layout_name
from slime_sglang import loading
from slime_sglang.layout import layout
from slime_sglang.server_sizes import unknown

if TYPE_CHECKING:
    from slime_core.types import Checksum, RankTensor, WeightCheck, WeightUpdate
    from slime_sglang.router import Lane, LaneKey

NEEDS = {"disk": "disk_update", "tensor": "tensor_update", "nccl": "nccl_update"}  # transport -> feature


@dataclass(slots=True, frozen=True, kw_only=True)
class Ways:
    """What of a run decides how weights travel."""

    model: Any  # the policy's config, from transformers; None: nothing is compared
    dtype: Literal["float32", "bfloat16"]  # of the servers' tensors
    features: frozenset[str]  # of the installation
    folder: Path  # of the disk transport
    device: Literal["cpu", "cuda"] = "cpu"
    requested: Literal["auto", "disk", "tensor", "nccl"] = "auto"
    shared: bool = True  # servers and trainer share their GPUs
    buffer_bytes: int = 512 << 20
    host: str = "127.0.0.1"  # where the trainer listens for servers that join its process group
    timeout: float = 600.0
    places: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {0: (0,)})
    """Of each server the trainer rank on the GPU of each of its ranks; empty: some share no GPU with the trainer."""
    fp8: bool = False  # linear weights are sent in fp8
    torch: str = ""  # version in the servers' environment; empty: not known
    trainer: str = ""  # and in the trainer's; empty: that of this process
    adapters: bool = False  # updates have adapters beside the base, which is sent to servers that lack it

    @property
    def unmapped(self) -> str:
        """Why servers cannot map memory of the trainer; empty where they can."""
        lonely = self.device == "cuda" and self.shared and not self.places
        return why_unmapped(self.torch, self.trainer) or (
            "a server has no GPU that a trainer rank has" if lonely else ""
        )

    @property
    def transport(self) -> Transport:
        """The one that is used.

        Raises:
            EngineError: ENG86 the installation lacks it, or its torch opens no handles of ours.
        """
        maps: Transport = "disk" if self.unmapped else "tensor"
        auto: Transport = "disk" if self.device == "cpu" else maps if self.shared else "nccl"
        transport: Transport = auto if self.requested == "auto" else self.requested
        if transport == "tensor" and (reason := self.unmapped):
            raise EngineError(
                "weights cannot go by tensor",
                code="ENG86",
                where="rollout.update_weight_transport",
                why=reason,
                fix="--update-weight-transport disk   or the same torch in both environments, and servers on the "
                "trainer's GPUs",
            )
        if NEEDS[transport] not in self.features:
            raise EngineError(
                f"this SGLang takes no weights by {transport}",
                code="ENG86",
                where="rollout.update_weight_transport",
                fix="--update-weight-transport disk   or a newer SGLang",
            )
        return transport


class WeightRoutes:
    """Routes of one engine's updates. ``note`` gets sentences for people.

    Example:
        weights = Weights(Ways(model=config, dtype="bfloat16", features=features, folder=run_dir / "weights"), note)
        route = await weights.route("rolling", lanes)
    """

    def __init__(self, ways: Ways, note: Callable[[str], None] = lambda text: None) -> None:
        self._ways, self._note = ways, note
        if ways.requested == "auto" and ways.shared and ways.device == "cuda" and (reason := ways.unmapped):
            note(f"weights go through a folder (disk) and not from memory to memory: {reason}")
        self._choice: Choice | None = None
        self._silent = False  # nothing can be compared
        self._group = ""  # of processes, for nccl
        self._members: dict[LaneKey, int] = {}  # of the group, with the number of the first rank of each

    async def route(self, check: WeightCheck, lanes: Sequence[Lane]) -> WeightRoute:
        """How the next update reaches these servers.

        Raises:
            EngineError: ENG86 the installation lacks the transport, or a model whose tensors are not known.
        """
        ways = self._ways
        base = not ways.adapters or not all(lane.base for lane in lanes)
        route = WeightRoute(
            transport=ways.transport,
            dtype=ways.dtype,
            buffer_bytes=ways.buffer_bytes,
            checksum=checksum_of(ways.device),
            checks=await self._checks(check if base else "none", lanes),
            timeout=ways.timeout,
            folder=str(ways.folder) if ways.adapters or ways.transport == "disk" else "",
            base=base,
        )
        if route.transport == "disk" or not base:
            return route
        if route.transport == "tensor":
            ranks = {rank for lane in lanes for rank in ways.places.get(lane.number, ())}
            return replace(route, copies=tuple(sorted(ranks - {0})))
        members, world = {}, 1
        for lane in lanes:
            members[lane.key] = world
            world += lane.world
        if members != self._members or not self._group:
            self._group, self._members = f"slime-{secrets.token_hex(4)}", members
        return replace(route, address=f"{ways.host}:0", world=world, group=self._group)

    async def load(self, lane: Lane, update: WeightUpdate, *, flush: bool) -> None:
        """Have one server take an update; raises as `loading.load`."""
        try:
            await loading.load(
                lane.client,
                update,
                timeout=self._ways.timeout,
                flush=flush,
                ranks=lane.tp,
                first_rank=self._members.get(lane.key, 1),
                trainers=self._ways.places.get(lane.number, ()),
            )
        except EngineError:
            self._group = ""  # of no use any more
            raise

    async def _checks(self, check: WeightCheck, lanes: Sequence[Lane]) -> tuple[RankTensor, ...]:
        if check == "none" or self._silent or not lanes:
            return ()
        if self._choice is None:
            self._choice = await self._choose(lanes[0])
        return self._choice.take(check) if self._choice is not None else ()

    async def _choose(self, lane: Lane) -> Choice | None:
        """What can be compared on servers like this one."""
        reason = ""
        if "weights_checker" not in self._ways.features:
            reason = "this SGLang answers no checksums"
        elif self._ways.model is None:
            reason = "nothing is known of the model's tensors"
        elif lane.fact("enable_dp_attention"):
            reason = "ranks of data-parallel attention hold other parts than the layout knows"
        elif lane.fact("pp_size", 1) != 1:
            reason = "pipeline stages hold a part of the layers each"
        elif lane.fact("quantization") and not self._ways.fp8:
            reason = f"the servers quantize what they load ({lane.fact('quantization')})"
        else:
            reason = unknown(self._ways.model)
        if reason:
            self._silent = True
            self._note(f"tensors of servers are not compared with the trainer's: {reason}")
            return None
        ranks = await lane.client.checksums()
        if any(name.endswith(SCALE) for name in ranks[0]):
            self._silent = True
            self._note(
                "tensors of servers are not compared with the trainer's: this SGLang tells no checksums of values"
            )
            return None
        rows = layout(
            list(ranks[0]),
            self._ways.model,
            lane.tp,
            ep=int(lane.fact("ep_size", 1) or 1),
            tower_ranks=int(bool(lane.fact("mm_enable_dp_encoder"))),
            cpu=self._ways.device == "cpu",
        )
        if (count := _told_ranks(lane, len(ranks))) < lane.tp:
            self._note(f"this SGLang reports checksums only for the first of each server's {lane.tp} ranks")
            rows = tuple(row for row in rows if row.rank < count)
        return Choice(rows)

    def all_checks(self) -> tuple[RankTensor, ...]:
        """Every row that can be compared; empty where none can, or none was ever asked for."""
        return self._choice.rows if self._choice is not None else ()

    def expected(self, folder: Path) -> dict[str, str]:
        """Checksums of all rows, from the folder of an update by disk; blocks for as long as reading it takes."""
        import torch

        from slime_core.weights.shards import Shards
        from slime_sglang.hashing import expected

        kind, dtype = checksum_of(self._ways.device), getattr(torch, self._ways.dtype)
        shards = Shards({layout_name(name): info for name, info in Shards.open(folder).infos.items()})
        return expected(shards, self.all_checks(), dtype, kind)


def why_unmapped(server_version: str, trainer_version: str = "") -> str:
    """Why servers with torch ``server_version`` cannot map the memory of a trainer; empty where they can.

    ``trainer_version`` is by default the torch of this process.
    What both sides exchange is torch's own, and has changed between minor versions.
    """
    trainer_version = trainer_version or version_of("torch")
    if not server_version:
        return f"the servers' torch is not known, ours is {trainer_version}"
    if _minor(server_version) == _minor(trainer_version):
        return ""
    return (
        f"the servers have torch {server_version} and the trainer {trainer_version}; both need the same minor version"
    )


def _minor(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def checksum_of(device: str) -> Checksum:
    """The kind that SGLang computes of tensors on ``device``."""
    return "sha256" if device == "cpu" else "murmur"


def by_key(lane: Lane, ranks: Sequence[Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """One server's checksums by `types.Held.key`, under the names of its copies of the model."""
    fingerprints: dict[str, dict[str, str]] = {}
    ranks_per = _told_ranks(lane, len(ranks))
    for at, tensors in enumerate(ranks):
        copy, rank = divmod(at, ranks_per)
        label = f"server {lane.number}" + (f" copy {copy}" if len(ranks) > ranks_per else "")
        keys = {f"{name}@{rank}" if rank else name: value for name, value in tensors.items()}
        fingerprints.setdefault(label, {}).update(keys)
    return fingerprints


def _told_ranks(lane: Lane, answers: int) -> int:
    """Tensor-parallel ranks that a server tells of for each copy of the model: all, or before 0.5.23 the first."""
    return lane.tp if answers >= lane.tp * lane.ranks else 1
