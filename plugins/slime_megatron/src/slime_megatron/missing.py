"""Problems of flags whose library, device or other flag is not there. Imports no megatron."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem
from slime_core.config.values import show

if TYPE_CHECKING:
    from slime_megatron.flags import Values

LIBRARIES = {
    "cpu_offloading": "transformer_engine",
    "use_te_activation_func": "transformer_engine",
    "use_precision_aware_optimizer": "transformer_engine",
    "moe_enable_deepep": "deep_ep",
}
"""Fields that cannot be had without a library."""
OFFLOAD = "optimizer_cpu_offload"
IMPLIED = {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
"""What an optimizer in main memory means: all of it, and no masters left on the device."""
ONLY_THERE = (
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)
"""Fields that mean something with it alone."""
FLOAT32 = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields that it has fixed."""


def missing(options: Values, device: str) -> list[Problem]:
    """What flags ask for and cannot get on ranks of a ``device``, ``cpu`` or ``cuda``."""
    offloaded = bool(options.optimizer.get(OFFLOAD))
    problems = []
    for flag, library in LIBRARIES.items():
        value = options.transformer.get(flag) or (options.optimizer.get(flag) and not offloaded)
        if value and not (device == "cuda" and installed(library)):
            message = f"megatron.{flag} needs {library}, which cannot be used here"
            reason = "it is not installed" if device == "cuda" else "it needs a GPU"
            problems.append(_problem(flag, message, reason, f"install {library}, or leave {flag} out"))
    if options.transformer.get("fp32_residual_connection") and device == "cuda" and installed("transformer_engine"):
        message = "megatron.fp32_residual_connection cannot be had with Transformer Engine"
        reason = "its norms and linear layers take the dtype of their weights alone"
        problems.append(_problem("fp32_residual_connection", message, reason, "leave fp32_residual_connection out"))
    parts = options.transformer.get("recompute_modules") or ()
    if "layernorm" in parts and not (device == "cuda" and installed("transformer_engine")):
        message = "megatron.recompute_modules = layernorm needs transformer_engine, which cannot be used here"
        reason = "megatron-core asks it about 8-bit numbers where an output is dropped and made again"
        fix = "leave layernorm out of recompute_modules; train.compile keeps the input of a norm alone anyway"
        problems.append(_problem("recompute_modules", message, reason, fix))
    if options.ddp.get("overlap_param_gather") and options.ddp.get("use_distributed_optimizer") is False:
        message = "megatron.overlap_param_gather has nothing to gather"
        reason = "without use_distributed_optimizer every rank steps all weights"
        problems.append(_problem("overlap_param_gather", message, reason, "leave overlap_param_gather out"))
    return problems + (_offload(options, device) if offloaded else [])


def _offload(options: Values, device: str) -> list[Problem]:
    optimizer, problems = options.optimizer, []
    if device == "cpu":
        message = f"megatron.{OFFLOAD} has nothing to offload"
        reason = "the trainer's ranks compute on processors"
        problems.append(_problem(OFFLOAD, message, reason, "leave --optimizer-cpu-offload out"))
    reason = "megatron-core steps shares of main memory and of the device with its distributed optimizer alone"
    for flag in ("use_distributed_optimizer", "use_precision_aware_optimizer"):
        if optimizer.get(flag) is False:
            message = f"megatron.{flag} = false goes with no {OFFLOAD}"
            problems.append(_problem(flag, message, reason, f"leave {flag} out: --optimizer-cpu-offload provides it"))
    share = optimizer.get("optimizer_offload_fraction", 1.0)
    if not 0 < share <= 1:
        message = f"megatron.optimizer_offload_fraction = {show(share)} is out of range"
        reason = "it is the share of the optimizer that main memory has"
        fix = "above 0, up to 1; without --optimizer-cpu-offload all of it stays on the device"
        problems.append(_problem("optimizer_offload_fraction", message, reason, fix, code="CFG03"))
    for flag in FLOAT32:
        if optimizer.get(flag, "fp32") != "fp32":
            message = f"megatron.{flag} = {show(optimizer[flag])} goes with no {OFFLOAD}"
            fix = f"leave {flag} out, or --optimizer-cpu-offload"
            problems.append(_problem(flag, message, "gradients, masters and moments there are float32", fix))
    return problems


def unused(options: Values) -> list[str]:
    """A notice for each flag of an optimizer in main memory where it is not there."""
    if options.optimizer.get(OFFLOAD):
        return []
    return [
        f"{name} has no effect without --optimizer-cpu-offload" for name in ONLY_THERE if name in options.optimizer
    ]


def _problem(flag: str, what: str, why: str, fix: str, code: str = "CFG04") -> Problem:
    return Problem(code=code, what=what, keys=(("megatron", flag),), why=why, fix=fix)


def installed(name: str) -> bool:
    """Whether a library could be imported."""
    return find_spec(name) is not None
