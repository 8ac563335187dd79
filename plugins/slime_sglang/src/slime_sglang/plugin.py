"""SGLang as `rollout_engine = "sglang"`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import slime_core
from slime_core.backends import EngineBackend, EngineStart, Plan, Planning, ServedEngines
from slime_core.protocols import Check, CheckResult

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.planning.footprint import EngineFootprint, Subject, TrainerFootprint


@slime_core.hookimpl
def slime_engine() -> list[EngineBackend]:
    """Servers of SGLang, started or attached to."""
    from slime_sglang import rules

    return [
        EngineBackend(
            name="sglang",
            library="aiohttp",
            tables=("router",),
            options=_options,
            rules=rules.conflicts,
            notices=rules.notices,
            plan=_plan,
            start=_start,
            gpus=_gpus,
            count=rules.count,
            spreads=rules.spreads,
            gives_memory=_gives_memory,
            memory=_memory,
            senders={"tensor": _tensor, "nccl": _nccl},
            checksums={"murmur": _murmur},
        )
    ]


@slime_core.hookimpl
def slime_checks() -> list[Check]:
    """Which SGLang a run would use."""
    return [Check(name="installation", run=_installation)]


def _installation() -> CheckResult:
    from slime_sglang.planning import sglang

    return sglang()


def _options() -> list[dict[str, str]]:
    from slime_sglang.planning import option_rows

    return option_rows()


def _plan(planning: Planning) -> Plan | None:
    from slime_sglang.planning import plan

    return plan(planning)


def _start(start: EngineStart) -> AbstractAsyncContextManager[ServedEngines]:
    from slime_sglang.start import sglang_engines

    return sglang_engines(start)


def _tensor(device: Any) -> Any:
    from slime_sglang.senders.tensor import TensorSender

    return TensorSender(device)


def _nccl(device: Any) -> Any:
    from slime_sglang.senders.nccl import BroadcastSender

    return BroadcastSender(device)


def _murmur(dtype: Any) -> Any:
    from slime_sglang.hashing import Murmur

    return Murmur(dtype)


def _gives_memory(config: Config) -> bool:
    from slime_sglang.sharing import gives_memory, options_set

    return gives_memory(config, options_set(config))


def _memory(subject: Subject, trainer: TrainerFootprint | None) -> EngineFootprint:
    from slime_sglang.memory import footprint

    return footprint(subject, trainer)


def _gpus(config: Config) -> Sequence[Sequence[int]]:
    from slime_sglang.topology import topology

    return [server.gpus for server in topology(config).servers]
