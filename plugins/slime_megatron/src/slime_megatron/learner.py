"""A stage that learns: megatron-core's gradient buffers and its optimizer, at slime's rates, stepped or left alone.

gradients over micro-batches -> reduced over data-parallel ranks -> norm over all ranks -> clip -> Adam
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from slime_core.trainers.optimizer_step import Schedule
from slime_megatron import offloading
from slime_megatron.experts import GroupedExperts
from slime_megatron.low_rank import sum_gradients

if TYPE_CHECKING:
    from slime_megatron.lora import StageAdapter
    from slime_megatron.model import ModelStage
    from slime_megatron.settings import Built


@dataclass(slots=True)
class MegatronLearner:
    """``begin`` gives it a fresh optimizer; a step that is not made advances neither Adam nor the schedule."""

    stage: ModelStage
    adapter: StageAdapter | None = None  # that it steps, in place of the whole stage
    wrapped: list[Any] = field(default_factory=list)  # megatron-core's DistributedDataParallel of each chunk
    optimizer: Any = None
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=0.0))
    clip_grad: float = 0.0
    weight_decay: float = 0.0
    steps: int = 0  # optimizer steps made in this stage

    def wrap(self, built: Built) -> None:
        """Make the gradient buffers; once."""
        config = self.stage.config
        with self._alone():
            self.wrapped = [DistributedDataParallel(config, built.ddp, chunk) for chunk in self.stage.chunks]
        if not (built.ddp.overlap_grad_reduce or built.ddp.overlap_param_gather):
            for experts in (one for chunk in self.stage.chunks for one in chunk.modules()):
                if isinstance(experts, GroupedExperts):
                    experts.direct = True
        config.finalize_model_grads_func = _finalize
        if built.ddp.overlap_param_gather:
            self.stage.chunks[-1].wait_for = self._wait_for

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What else learns in the stage is frozen inside the block: megatron-core takes all that is not."""
        others: list[torch.nn.Parameter] = []
        if self.adapter is not None:
            stepped = {id(local.tensor) for local in self.adapter.tensors.by_name.values()}
            others = [p for p in self.stage.parameters() if p.requires_grad and id(p) not in stepped]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _wait_for(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:  # or it is the base of an adapter
            self.wrapped[-1].param_to_bucket_group[parameter].finish_param_sync()

    @torch.no_grad()
    def settle(self) -> None:
        """Have whole parameters on every rank, where they are gathered during the next forward pass; a collective."""
        for ddp in self.wrapped:
            if ddp.ddp_config.overlap_param_gather:
                ddp.start_param_sync(force_sync=True)

    def begin(self, train: Any, schedule: Schedule, built: Built) -> None:
        """A fresh optimizer with the [train] section's settings."""
        self.optimizer = None  # its memory first
        with self._alone(), torch.no_grad():  # or float32 shards would be no leaves, which one in main memory refuses
            self.optimizer = get_megatron_optimizer(built.optimizer, self.wrapped)
        for one in _optimizers(self.optimizer):
            _fuse(one.optimizer)
        for one in self._offloaded():
            offloading.page_lock(one)
        self.schedule, self.clip_grad, self.weight_decay = schedule, train.clip_grad, train.weight_decay
        self.steps = 0

    def ready(self) -> None:
        """No gradients, and the rate of the next step, which a hook before its first pass may change."""
        self.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.weight_decay * group.get("wd_mult", 1.0)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Every parameter's ``main_grad`` whole on each data-parallel rank, where each has a part; a collective."""
        for buffer in self._buffers():
            if buffer.ddp_config.use_distributed_optimizer:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)

    def norm(self) -> float:
        """Make gradients ready, and their Euclidean norm over all ranks; not finite where one is not; a collective."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def update(self, norm: float) -> float:
        """Clip and step; after :meth:`ready`. The gradients are of no more use. The answer is the learning rate."""
        rate = self.rate
        if self.clip_grad > 0:
            for one in _optimizers(self.optimizer):
                if parameters := one.get_parameters():
                    apart = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(
                        parameters, max_norm=self.clip_grad, total_norm=norm, use_decoupled_grad=apart
                    )
        for one in self._offloaded():
            offloading.hand_over(one)
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return rate

    def _offloaded(self) -> list[Any]:
        return [one for one in _optimizers(self.optimizer) if offloading.is_offloaded(one)]

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.at(self.steps)

    def states(self) -> Iterator[torch.Tensor]:
        """What the optimizer keeps, some of it parameters."""
        for one in _optimizers(self.optimizer) if self.optimizer is not None else ():
            if offloading.is_offloaded(one):
                yield from offloading.tensors(one)
                continue
            for group in one.optimizer.param_groups:
                yield from group["params"]
            for state in one.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradient buffers."""
        return (buffer.grad_data for buffer in self._buffers())

    def _buffers(self) -> Iterator[Any]:
        for ddp in self.wrapped:
            yield from (*ddp.buffers, *ddp.expert_parallel_buffers)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for ddp in self.wrapped:
            ddp.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            for one in self._offloaded():
                offloading.let_go(one)


def _finalize(model: Any, tokens: Any, **kwargs: Any) -> None:
    """Reduce gradients over ranks and divide them by nothing: weights are those of the whole step."""
    finalize_model_grads(model, None, **kwargs)
    sum_gradients(model)


def _fuse(inner: Any) -> None:
    """One kernel for all of Adam, where it is torch's: step by step it reads and writes its states several times."""
    for group in inner.param_groups if isinstance(inner, torch.optim.Adam) else ():
        group["fused"], group["foreach"] = True, False


def _optimizers(optimizer: Any) -> Iterable[Any]:
    """Dense parameters and experts have an optimizer each."""
    return [one for one in optimizer.chained_optimizers if not getattr(one, "is_stub_optimizer", False)]
