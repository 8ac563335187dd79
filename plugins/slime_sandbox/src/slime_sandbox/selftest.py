"""The sandbox's self-test, from outside: what a jailed process could and could not do, layer by layer.

It runs when a sandbox is opened, through the same door as every candidate. A layer that lets its probe through, or
does not let its control through, is missing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_core.errors import SandboxError
from slime_sandbox.levels import out_of_reach
from slime_sandbox.probes import EXPECTED
from slime_sandbox.types import Limits, Outcome

if TYPE_CHECKING:
    from slime_sandbox.box import Sandbox

ENTRY = "slime_sandbox.probes:main"
COMPUTE = "slime_sandbox.probes:compute"
LIMITS = Limits(wall_seconds=60.0, open_files=64, disk_bytes=1 << 20, files=64)


@dataclass(slots=True, frozen=True, kw_only=True)
class Witness:
    """One layer, tried.

    Example:
        Witness(layer="uid", allowed="is user 4242", denied="setuid to root: Operation not permitted", holds=True)
    """

    layer: str
    allowed: str  # the control, and how it went
    denied: str  # the probe, and how it went
    holds: bool


async def witness(box: Sandbox) -> tuple[Witness, ...]:
    """Try every layer of the sandbox's level. Raises `SandboxError` (SBX134) where one does not hold."""
    with tempfile.NamedTemporaryFile(prefix="slime-sandbox-marker-") as marker:
        os.chmod(marker.name, 0o644)
        spaces = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "uts")}
        request = {"layers": box.layers, "marker": marker.name, "namespaces": spaces}
        outcome = await box.run(ENTRY, json.dumps(request).encode(), LIMITS)
    if outcome.status != "ok":
        reason = f"{outcome.reason}\n{outcome.stdout}".strip()
        raise out_of_reach(box.level, _blamed(reason), reason)
    proofs = witnesses(json.loads(outcome.result), outcome)
    for one in proofs:
        if not one.holds:
            raise _refusal(box.level, one)
    return proofs


async def compute_on(box: Sandbox, gpu: str | None, device: str = "cuda") -> Outcome:
    """How a candidate with that GPU, a UUID, ends that computes on the device; ``reason`` has torch's last words."""
    limits = Limits(wall_seconds=120.0, memory_bytes=8 << 30, processes=256, open_files=1024)
    outcome = await box.run(COMPUTE, device.encode(), limits, gpu=gpu)
    if outcome.status == "ok":
        return outcome
    return replace(outcome, reason="; ".join([outcome.reason, *outcome.stdout.strip().splitlines()[-1:]]))


def witnesses(tried: Mapping[str, Any], outcome: Outcome) -> tuple[Witness, ...]:
    """The process's words, and for the filter what the warden counted."""
    proofs = []
    for layer, ((control, works), (probe, passes)) in tried.items():
        holds = works and not passes
        if layer == "seccomp":
            counted = {name: outcome.violations.get(name, 0) for name in EXPECTED}
            probe, holds = f"{probe}; counted {counted}", holds and counted == EXPECTED
        proofs.append(Witness(layer=layer, allowed=control, denied=probe, holds=holds))
    return tuple(proofs)


def _refusal(level: str, one: Witness) -> SandboxError:
    return out_of_reach(level, one.layer, f"the self-test: {one.allowed}; {one.denied}")


def _blamed(reason: str) -> str:
    """The layer that a failed start of a jail names by its system call."""
    calls = {"landlock": "landlock", "seccomp": "seccomp", "mount": "mount namespace", "unshare": "user namespace"}
    return next((layer for call, layer in calls.items() if call in reason), "the self-test")
