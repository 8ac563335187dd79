"""The row of `slime doctor` about the sandbox, the same layer by layer for `-v`, and whether a GPU computes in it."""

from __future__ import annotations

import asyncio
import functools

from slime_core.errors import SandboxError
from slime_core.protocols import Check, CheckResult
from slime_core.sandbox import Limits, Outcome, Policy, Sandbox, compute_on
from slime_core.sandbox.levels import WAYS

SLEEPER = "slime_core.sandbox.probes:sleep"
DEADLINE = 0.2


def sandbox_checks(*, each_layer: bool = False) -> list[Check]:
    """The level that this machine reaches; with ``each_layer`` every layer of level strong and the deadline too."""
    layers = [Check(name=f"sandbox {layer}", run=functools.partial(_layer, layer)) for layer in WAYS["strong"][0]]
    layers.append(Check(name="sandbox deadline", run=_deadline))
    gpu = Check(name="sandbox gpu", run=_gpu)
    return [Check(name="sandbox", run=_level), *(layers if each_layer else []), gpu]


@functools.cache
def _tried() -> tuple[Sandbox, Outcome] | SandboxError:
    """A sandbox that was opened, tested and closed again."""

    async def attempt() -> tuple[Sandbox, Outcome]:
        async with await Sandbox.open(Policy()) as box:
            return box, await box.run(SLEEPER, limits=Limits(wall_seconds=DEADLINE))

    try:
        return asyncio.run(attempt())
    except SandboxError as error:
        return error


def _level() -> CheckResult:
    tried = _tried()
    if isinstance(tried, SandboxError):
        found = f"{tried.what}: {tried.why}; code from a model cannot be run here"
        return CheckResult(status="warn", found=found, fix=tried.fix)
    box, _ = tried
    counted = "memory by control groups" if box.groups is not None else "memory by address space"
    if _deadline().status == "fail":
        return CheckResult(status="fail", found=_deadline().found)
    if box.missing is None:
        layers = f"its {len(box.witnesses)} layers hold (-v lists them)"
        return CheckResult(status="ok", found=f"level {box.level}, {counted}; {layers}")
    return CheckResult(
        status="warn", found=f"level {box.level}; {box.missing.what}: {box.missing.why}", fix=box.missing.fix
    )


def _layer(layer: str) -> CheckResult:
    tried = _tried()
    if isinstance(tried, SandboxError):
        return CheckResult(status="warn", found="not tried", fix="see the row 'sandbox'")
    for one in tried[0].witnesses:
        if one.layer == layer:
            return CheckResult(status="ok", found=f"allowed: {one.allowed}; denied: {one.denied}")
    return CheckResult(status="warn", found=f"not part of level {tried[0].level}", fix="see the row 'sandbox'")


def _deadline() -> CheckResult:
    tried = _tried()
    if isinstance(tried, SandboxError):
        return CheckResult(status="warn", found="not tried", fix="see the row 'sandbox'")
    outcome = tried[1]
    found = f"a candidate that sleeps for ever: {outcome.reason}"
    return CheckResult(status="ok" if outcome.status == "timeout" else "fail", found=found)


def _gpu() -> CheckResult:
    import torch

    if not torch.cuda.is_available():
        return CheckResult(status="ok", found="torch sees no GPU")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return gpu_result(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def gpu_result(uuid: str) -> CheckResult:
    """Whether a candidate with that GPU can compute on it."""

    async def attempt() -> Outcome:
        async with await Sandbox.open(Policy(gpu=True), preload=("torch",)) as box:
            return await compute_on(box, uuid)

    try:
        outcome = asyncio.run(attempt())
    except SandboxError as error:
        return CheckResult(status="warn", found=f"not tried: {error.what}", fix="see the row 'sandbox'")
    if outcome.status == "ok":
        return CheckResult(status="ok", found=f"{uuid} computes at level {outcome.level}, {outcome.seconds:.1f} s")
    found = f"{uuid}: {outcome.reason[:300]}"
    return CheckResult(status="warn", found=found, fix="kernels can be judged without timing: --judge-gpus ''")
