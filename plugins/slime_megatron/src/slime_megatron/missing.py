"""Flags of a run in; a problem for each whose library, device or other flag is not there, out. Imports no megatron."""

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


def missing(asked: Values, device: str) -> list[Problem]:
    """What flags ask for and cannot get on ranks of a ``device``, ``cpu`` or ``cuda``."""
    offloaded = bool(asked.optimizer.get(OFFLOAD))
    found = []
    for flag, library in LIBRARIES.items():
        wanted = asked.transformer.get(flag) or (asked.optimizer.get(flag) and not offloaded)
        if wanted and not (device == "cuda" and installed(library)):
            what = f"megatron.{flag} needs {library}, which cannot be used here"
            why = "it is not installed" if device == "cuda" else "it needs a GPU"
            found.append(_problem(flag, what, why, f"install {library}, or leave {flag} out"))
    if asked.transformer.get("fp32_residual_connection") and device == "cuda" and installed("transformer_engine"):
        what = "megatron.fp32_residual_connection cannot be had with Transformer Engine"
        why = "its norms and linear layers take the dtype of their weights alone"
        found.append(_problem("fp32_residual_connection", what, why, "leave fp32_residual_connection out"))
    parts = asked.transformer.get("recompute_modules") or ()
    if "layernorm" in parts and not (device == "cuda" and installed("transformer_engine")):
        what = "megatron.recompute_modules = layernorm needs transformer_engine, which cannot be used here"
        why = "megatron-core asks it about 8-bit numbers where an output is dropped and made again"
        fix = "leave layernorm out of recompute_modules; train.compile keeps the input of a norm alone anyway"
        found.append(_problem("recompute_modules", what, why, fix))
    if asked.ddp.get("overlap_param_gather") and asked.ddp.get("use_distributed_optimizer") is False:
        what = "megatron.overlap_param_gather has nothing to gather"
        why = "without use_distributed_optimizer every rank steps all weights"
        found.append(_problem("overlap_param_gather", what, why, "leave overlap_param_gather out"))
    return found + (_offload(asked, device) if offloaded else [])


def _offload(asked: Values, device: str) -> list[Problem]:
    given, found = asked.optimizer, []
    if device == "cpu":
        what = f"megatron.{OFFLOAD} has nothing to offload"
        why = "the trainer's ranks compute on processors"
        found.append(_problem(OFFLOAD, what, why, "leave --optimizer-cpu-offload out"))
    why = "megatron-core steps shares of main memory and of the device with its distributed optimizer alone"
    for flag in ("use_distributed_optimizer", "use_precision_aware_optimizer"):
        if given.get(flag) is False:
            what = f"megatron.{flag} = false goes with no {OFFLOAD}"
            found.append(_problem(flag, what, why, f"leave {flag} out: --optimizer-cpu-offload brings it"))
    share = given.get("optimizer_offload_fraction", 1.0)
    if not 0 < share <= 1:
        what = f"megatron.optimizer_offload_fraction = {show(share)} is out of range"
        why = "it is the share of the optimizer that main memory has"
        fix = "above 0, up to 1; without --optimizer-cpu-offload all of it stays on the device"
        found.append(_problem("optimizer_offload_fraction", what, why, fix, code="CFG03"))
    for flag in FLOAT32:
        if given.get(flag, "fp32") != "fp32":
            what = f"megatron.{flag} = {show(given[flag])} goes with no {OFFLOAD}"
            fix = f"leave {flag} out, or --optimizer-cpu-offload"
            found.append(_problem(flag, what, "gradients, masters and moments there are float32", fix))
    return found


def unused(asked: Values) -> list[str]:
    """A notice for each flag of an optimizer in main memory where it is not there."""
    if asked.optimizer.get(OFFLOAD):
        return []
    return [f"{name} has no effect without --optimizer-cpu-offload" for name in ONLY_THERE if name in asked.optimizer]


def _problem(flag: str, what: str, why: str, fix: str, code: str = "CFG04") -> Problem:
    return Problem(code=code, what=what, keys=(("megatron", flag),), why=why, fix=fix)


def installed(name: str) -> bool:
    """Whether a library could be imported."""
    return find_spec(name) is not None
