"""What an optimizer keeps of each parameter: its float32 master and both moments, of all of it or of a flat range.

megatron-core's distributed optimizer deals ranges of flat buffers to data-parallel ranks; the other two keep whole
shards. Which range of which parameter this rank has is all that is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from slime_core.errors import TrainerError

MASTER, MOMENTS = "fp32_param", ("exp_avg", "exp_avg_sq")
"""As megatron-core's checkpoints call them."""


@dataclass(slots=True, frozen=True)
class Master:
    """Elements ``begin`` to ``end`` of a parameter's shard, as one optimizer keeps them.

    ``dealt``: the other data-parallel ranks have the other elements; else they have copies.
    """

    parameter: torch.Tensor
    begin: int
    end: int
    dealt: bool
    one: Any  # the optimizer
    main: torch.Tensor  # what the inner optimizer steps: the key of its states

    def weights(self) -> torch.Tensor:
        """Its float32 values, flat."""
        if self.made and not self.one.optimizer.state[self.main]:  # before the first step there is no master
            return self.parameter.detach().reshape(-1)[self.begin : self.end].float()
        return self._states()["param"].detach().reshape(-1)

    def moment(self, name: str) -> torch.Tensor:
        """A moment, flat and float32; there is none before the first step."""
        return self._states()[name].detach().reshape(-1).float()

    @property
    def made(self) -> bool:
        """Whether what is read is made for that: the states are kept in another form."""
        return bool(getattr(self.one.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))

    @property
    def exact(self) -> bool:
        """Whether the parameter itself is the master."""
        return self.parameter.dtype == torch.float32

    def _states(self) -> dict[str, torch.Tensor]:
        if isinstance(self.one, DistributedOptimizer):
            found: dict[str, torch.Tensor] = self.one._get_main_param_and_optimizer_states(self.parameter)
            return found
        return {"param": self.main, **self.one.optimizer.state[self.main]}

    @torch.no_grad()
    def put(self, weights: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """Take values and moments, flat, from the host; :func:`prepare` came before."""
        given = {"param": weights, **moments}
        if isinstance(self.one, DistributedOptimizer):
            known = self._states()
            placed = {n: t.view_as(known[n]).to(known[n].device) for n, t in given.items()}
            if "step" in known:
                placed["step"] = known["step"]
            self.one._set_main_param_and_optimizer_states(self.parameter, placed)
            return
        for name, tensor in self._states().items():
            if name in given:
                tensor.copy_(given[name].view_as(tensor))


def masters(optimizer: Any) -> Iterator[Master]:
    """Everything that this rank's optimizers keep, in the order of theirs."""
    for one in _each(optimizer):
        if isinstance(one, DistributedOptimizer):
            for parameter, (group, order) in one.model_param_group_index_map.items():
                span = one._get_model_param_range_map(parameter)["param"]
                main = one.optimizer.param_groups[group]["params"][order]
                yield Master(parameter, span.start, span.end, True, one, main)
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            pairs = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
            for halves, floats in pairs:
                for parameter, main in zip(halves, floats, strict=True):
                    yield Master(parameter, 0, parameter.numel(), False, one, main)
            for group in one.fp32_from_fp32_groups:
                for parameter in group:
                    yield Master(parameter, 0, parameter.numel(), False, one, parameter)
        else:
            for parameter in (p for group in one.optimizer.param_groups for p in group["params"]):
                yield Master(parameter, 0, parameter.numel(), False, one, parameter)


def prepare(optimizer: Any, steps: int) -> None:
    """Have moments for all parameters, and the count of steps that were made with them."""
    for one in _each(optimizer):
        inner = one.optimizer
        one.init_state_fn(inner, one.config)
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state["step"] = torch.tensor(float(steps))
        else:
            for group in inner.param_groups:
                group["step"] = steps


def check_kept(optimizer: Any) -> None:
    """Refuse states that cannot be read here.

    Raises:
        TrainerError: they are kept in main memory by megatron-core.
    """
    if any(isinstance(one.optimizer, HybridDeviceOptimizer) for one in _each(optimizer)):
        raise TrainerError(
            "the optimizer's states cannot be saved",
            where="megatron.optimizer_cpu_offload",
            why="megatron-core keeps them in main memory, in an optimizer whose state is not read here",
            fix="leave --optimizer-cpu-offload out; data-parallel ranks share the states as it is",
        )


def _each(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.chained_optimizers if not getattr(one, "is_stub_optimizer", False)]
