"""An optimizer in main memory: megatron-core's hybrid one, with what it leaves undone.

    gradient (device) -> page-locked copy -> AdamW on processors -> float32 master there -> parameter (device)

A share of the parameters (`optimizer_offload_fraction`) has masters, moments and step in main memory; the others' stay
on the device. `HybridDeviceOptimizer` of megatron-core 0.16 keeps masters in pageable memory, has no way to begin with
states that were saved, and leaves float32 parameters alone that stay on the device: their gradient is where it does
not look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def is_offloaded(one: Any) -> bool:
    """Whether an optimizer of megatron-core keeps states in main memory."""
    return isinstance(one.optimizer, HybridDeviceOptimizer)


@torch.no_grad()
def page_lock(one: Any) -> None:
    """Move masters in main memory to page-locked memory, from where a device copies many times as fast."""
    if not one.config.pin_cpu_params:
        return
    for group in one.optimizer.cpu_param_groups:
        for master in group["params"]:
            if not master.is_pinned():
                master.data = master.data.pin_memory()


def hand_over(one: Any) -> None:
    """Put the gradients of parameters that are their own masters where AdamW looks for them."""
    inner = one.optimizer
    for parameter, master in inner.param_to_inner_param.items():
        if master is parameter:
            parameter.grad = getattr(parameter, "decoupled_grad", parameter.grad)


def let_go(one: Any) -> None:
    """Forget the gradients of `hand_over`: views of buffers that change."""
    for parameter, master in one.optimizer.param_to_inner_param.items():
        if master is parameter:
            parameter.grad = None


def states(one: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """The master of a parameter's shard (``param``) and its moments, where they are; no moments before a step."""
    inner = one.optimizer
    return {**inner.state.get(main, {}), "param": inner.param_to_inner_param[main]}


@torch.no_grad()
def put(one: Any, main: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take a master and moments, flat; the device's shard becomes the master's."""
    current = states(one, main)
    for name, tensor in tensors.items():
        current[name].copy_(tensor.view_as(current[name]))
    if current["param"] is not main:
        main.copy_(current["param"])


def begin(one: Any, steps: int) -> None:
    """Have moments for all parameters, and the count of steps that were made with them."""
    for inner in one.optimizer.sub_optimizers:
        for group in inner.param_groups:
            for master in group["params"]:
                state = inner.state[master]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(master)
        count(inner, steps)
    one.optimizer._sync_sub_optimizers_state_to_hdo()


def count(inner: Any, steps: int) -> None:
    """Tell an inner optimizer how many steps its states have seen."""
    if not isinstance(inner, torch.optim.Adam):  # a fused one of a library
        for group in inner.param_groups:
            group["step"] = steps
        return
    for group in inner.param_groups:
        for master in group["params"]:
            place = master.device if group.get("fused") or group.get("capturable") else "cpu"
            inner.state[master]["step"] = torch.tensor(float(steps), device=place)


def tensors(one: Any) -> Iterator[torch.Tensor]:
    """Everything that it keeps, wherever it is."""
    for inner in one.optimizer.sub_optimizers:
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
