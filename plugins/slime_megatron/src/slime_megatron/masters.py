"""What an optimizer keeps of each parameter: its float32 master and both moments, of all of it or of a flat range.

megatron-core's distributed optimizer deals ranges of flat buffers to data-parallel ranks; the other two keep whole
shards. Which range of which parameter this rank has is all that is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from slime_megatron import offloading

MASTER, MOMENTS = "fp32_param", ("exp_avg", "exp_avg_sq")
"""As megatron-core's checkpoints call them."""


@dataclass(slots=True, frozen=True)
class Master:
    """Elements ``begin`` to ``end`` of a parameter's shard, as one optimizer keeps them.

    ``sharded``: other data-parallel ranks have the other elements; else each has a copy.
    """

    parameter: torch.Tensor
    begin: int
    end: int
    sharded: bool
    one: Any  # the optimizer
    main: torch.Tensor  # what the inner optimizer steps: the key of its states

    def weights(self) -> torch.Tensor:
        """Its float32 values, flat."""
        if self.is_converted and not self.one.optimizer.state[self.main]:  # before the first step there is no master
            return self.parameter.detach().reshape(-1)[self.begin : self.end].float()
        return self._states()["param"].detach().reshape(-1)

    def moment(self, name: str) -> torch.Tensor:
        """A moment, flat and float32; there is none before the first step."""
        return self._states()[name].detach().reshape(-1).float()

    @property
    def is_converted(self) -> bool:
        """Whether what is read is made for that: the states are kept in another form."""
        apart = bool(getattr(self.one.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
        return apart and not offloading.is_offloaded(self.one)

    @property
    def exact(self) -> bool:
        """Whether the parameter itself is the master, or always equal to it."""
        return self.parameter.dtype == torch.float32

    def _states(self) -> dict[str, torch.Tensor]:
        inner = self.one.optimizer
        if offloading.is_offloaded(self.one):
            return offloading.states(self.one, self.main)
        if self.is_converted:
            states = {name: inner.get_unscaled_state(self.main, name) for name in inner.state[self.main]}
            return {"param": states.pop("master_param", self.main), **states}
        return {"param": self.main, **inner.state[self.main]}

    @torch.no_grad()
    def put(self, weights: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """Take values and moments, flat, from the host; :func:`prepare` came before."""
        tensors = {"param": weights, **moments}
        if offloading.is_offloaded(self.one):
            offloading.put(self.one, self.main, tensors)
            return
        states = self._states()
        for name, tensor in tensors.items():
            shaped = tensor.view_as(states[name])
            if not self.is_converted:
                states[name].copy_(shaped)
            elif states[name] is not self.main:
                key = "master_param" if name == "param" else name
                self.one.optimizer.set_scaled_state(self.main, key, shaped.to(self.main.device))


def masters(optimizer: Any) -> Iterator[Master]:
    """Everything that this rank's optimizers keep, in the order of theirs."""
    for one in _optimizers(optimizer):
        if isinstance(one, DistributedOptimizer):
            for parameter, main in _sharded(one):
                span = one._get_model_param_range_map(parameter)["param"]
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


def _sharded(one: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of a distributed optimizer, and what its inner one steps for this rank's range of each.

    Its own `model_param_group_index_map` is wrong where a group has float32 parameters beside others.
    """
    apart = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    halves = one.shard_float16_groups if apart else one.shard_fp32_from_float16_groups
    for models, mains in ((one.model_fp32_groups, one.shard_fp32_groups), (one.model_float16_groups, halves)):
        for parameters, shards in zip(models, mains, strict=True):
            yield from zip(parameters, shards, strict=True)


def prepare(optimizer: Any, steps: int) -> None:
    """Have moments for all parameters, and the count of steps that were made with them."""
    for one in _optimizers(optimizer):
        if offloading.is_offloaded(one):
            offloading.begin(one, steps)
            continue
        one.init_state_fn(one.optimizer, one.config)
        offloading.count(one.optimizer, steps)


def _optimizers(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.chained_optimizers if not getattr(one, "is_stub_optimizer", False)]
