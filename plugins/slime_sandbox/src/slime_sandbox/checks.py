"""Rows of `slime doctor`: the level that this machine reaches, and whether a GPU computes in the sandbox."""

from __future__ import annotations

import asyncio

from slime_core import CheckResult
from slime_core.errors import SandboxError
from slime_sandbox.box import Sandbox
from slime_sandbox.levels import WAYS
from slime_sandbox.selftest import compute_on
from slime_sandbox.types import Limits, Outcome, Policy

SLEEPER = "slime_sandbox.probes:sleep"
DEADLINE = 0.2


def level() -> CheckResult:
    """The best level that this machine reaches; its details name what each layer allowed and denied."""

    async def attempt() -> tuple[Sandbox, Outcome]:
        async with await Sandbox.open(Policy()) as box:
            return box, await box.run(SLEEPER, limits=Limits(wall_seconds=DEADLINE))

    try:
        box, sleeper = asyncio.run(attempt())
    except SandboxError as error:
        message = f"{error.what}: {error.why}; code from a model cannot be run here"
        return CheckResult(status="warn", found=message, fix=error.fix)
    deadline = f"a candidate that sleeps for ever: {sleeper.reason}"
    layers = dict.fromkeys(WAYS["strong"][0], f"not part of level {box.level}")
    layers |= {one.layer: f"allowed: {one.allowed}; denied: {one.denied}" for one in box.witnesses}
    details = tuple(f"{name}: {text}" for name, text in [*layers.items(), ("deadline", deadline)])
    if sleeper.status != "timeout":
        return CheckResult(status="fail", found=deadline, details=details)
    if box.missing is not None:
        message = f"level {box.level}; {box.missing.what}: {box.missing.why}"
        return CheckResult(status="warn", found=message, fix=box.missing.fix, details=details)
    counted = "memory by control groups" if box.groups is not None else "memory by address space"
    message = f"level {box.level}, {counted}; its {len(box.witnesses)} layers hold (-v lists them)"
    return CheckResult(status="ok", found=message, details=details)


def gpu() -> CheckResult:
    """Whether a candidate can compute on the first GPU."""
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
        return CheckResult(status="warn", found=f"not tried: {error.what}", fix="see the row 'sandbox: level'")
    if outcome.status == "ok":
        return CheckResult(status="ok", found=f"{uuid} computes at level {outcome.level}, {outcome.seconds:.1f} s")
    problem = f"{uuid}: {outcome.reason[:300]}"
    return CheckResult(status="warn", found=problem, fix="kernels can be judged without timing: --judge-gpus ''")
