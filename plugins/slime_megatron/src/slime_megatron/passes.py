"""All micro-batches of an optimizer step through the pipeline's schedule: log-probs, or gradients and the step's sums.

The last stage makes the loss, in its last chunk of layers. Context-parallel ranks give each other their log-probs, so
that a loss sees whole sequences; tensor-parallel ranks have them all. Sums count once a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.lora.dropout import micro_keys
from slime_core.trainers import roles
from slime_core.trainers.expert_load import ExpertLoad, copies_of_rows
from slime_core.trainers.optimizer_step import LossSums, MicroBatchLoss, to_device
from slime_megatron.balance import auxiliary_losses
from slime_megatron.packing import Pack, make_pack, owned
from slime_megatron.pictures import make_pictures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Loss
    from slime_core.types import MicroBatch
    from slime_megatron.model import ModelStage
    from slime_megatron.routing import RoutedPass, StageRouters


@dataclass(slots=True, frozen=True)
class MicroBatchInputs:
    """One micro-batch as this rank computes it."""

    micro: MicroBatch
    pack: Pack
    copies: NDArray[np.int64]  # of its rows, `expert_load.copies_of_rows`, 0 of filling
    filling: torch.Tensor  # [1, N], True at rows that fill up
    temperature: torch.Tensor | None  # [R]
    experts: NDArray[np.int16] | None  # [N, local layers, k], to replay for its rows
    chosen: dict[int, torch.Tensor]  # [N, k] by layer, of a pass that records; in host memory


class Passes:
    """Passes of one model; every rank calls the same one with its data-parallel rank's micro-batches.

    ``wrapped`` are the stage's chunks as they learn (megatron-core's DistributedDataParallel), or the bare chunks.
    """

    def __init__(self, wrapped: Sequence[Any], stage: ModelStage, device: torch.device) -> None:
        self.wrapped, self.stage, self.device = wrapped, stage, device
        self.chunk = 0
        self.expert_load = ExpertLoad()
        self.routers: StageRouters | None = None  # where a run replays their choices
        self.routed: RoutedPass | None = None  # what the passes replay now
        self.drops = False  # whether passes with gradients drop inputs of adapters
        self.ahead = 0.0  # weight of the loss of tokens that are predicted one further ahead; 0 predicts none

    def scores(self, micros: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, ...]]:
        """What the stage's ``score`` gives for each micro-batch, [R] each, on the last stage; nothing on others."""

        def last(work: MicroBatchInputs, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            both = self._score(work, hidden)
            return hidden.new_zeros(()), self._one(), tuple(x.detach() for x in both)

        self.stage.eval()
        with torch.no_grad():
            return self._run(micros, last, forward_only=True)

    def backward(self, micros: Sequence[MicroBatch], loss: Loss, train: Any, sums: LossSums) -> None:
        """Add the gradients of an optimizer step to the stage's, reduced over ranks, and its sums to ``sums``."""

        def last(work: MicroBatchInputs, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss_part = MicroBatchLoss(loss, train, work.micro, np.arange(len(work.micro.weight)), self.device)
            log_prob, entropy = self._score(work, hidden)
            total = loss_part(slice(None), log_prob, entropy)
            metrics, both = loss_part.metric_sums, total
            if self.ahead:
                ahead = self.stage.chunks[-1].score_ahead(hidden, work.pack, work.micro, chunk=self.chunk)
                both = total + self.ahead * ahead
                metrics["mtp_loss"] = ahead.detach().double()
                dist.all_reduce(metrics["mtp_loss"], group=parallel_state.get_context_parallel_group())
            if speaks():
                sums.add({"loss": total, **metrics}, loss_part.mark_nonfinite)
            return both, self._one(), None

        self.stage.train()
        self.stage.share_embedding()
        self._run(micros, last, forward_only=False)

    def backward_values(self, micros: Sequence[MicroBatch], clip: float, sums: LossSums) -> None:
        """The same of a value model and the value loss; ``clip`` is ``train.value_clip``."""

        def last(work: MicroBatchInputs, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            (values,) = self._score(work, hidden)
            return roles.critic_loss(values, work.micro, clip, sums if speaks() else None), self._one(), None

        self.stage.train()
        self._run(micros, last, forward_only=False)

    def _run(self, micros: Sequence[MicroBatch], last: Any, *, forward_only: bool) -> list[Any]:
        """The schedule over the micro-batches; what ``last`` noted, one a micro-batch, on the last stage."""

        def step(works: Iterator[MicroBatchInputs], model: Any) -> tuple[torch.Tensor, Any]:
            work = next(works)
            if self.routers is not None:
                self.routers.forward(None if work.experts is None else to_device(work.experts, self.device))
            with nullcontext() if forward_only else self.expert_load.counting(work.copies):
                hidden = model(work.pack, work.filling if balanced else None)
            if self.routers is not None and self.routed is not None and self.routed.source == "record":
                work.chosen.update(self.routers.chosen(model))
            return hidden, lambda hidden: last(work, hidden)

        config, works = self.stage.config, [self._work(micro) for micro in micros]
        for work in works if self.drops and not forward_only else ():
            self._key_rows(work)
        rows = sum(len(micro.tokens) for micro in micros)
        sizes = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        losses = nullcontext(False) if forward_only else auxiliary_losses(config, rows, self.device)
        with losses as balanced, self._replaying(works, keeps=not forward_only):
            outputs: list[Any] = get_forward_backward_func(*sizes)(
                forward_step_func=step,
                data_iterator=[iter(works) for _ in self.wrapped],
                model=list(self.wrapped),
                num_microbatches=len(works),
                seq_length=1,  # of no use where lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return outputs

    @contextmanager
    def _replaying(self, works: Sequence[MicroBatchInputs], *, keeps: bool) -> Iterator[None]:
        """Replay experts in the passes of the block, or record them."""
        routers, routed = self.routers, self.routed
        if routers is None or routed is None:
            yield
            return
        with routers.active(keeps=keeps):
            yield
        if routed.source == "record" and routers.replays:
            for work in works:
                rows = torch.stack([work.chosen[layer] for layer in routers.replays], dim=1)
                routed.routing.record(work.micro, rows)

    def _work(self, micro: MicroBatch) -> MicroBatchInputs:
        config = self.stage.config
        cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
        pack = make_pack(micro, cp=cp, rank=rank, multiple=tp, device=self.device)
        shared, places = self._rows(pack)
        first = self.stage.chunks[0]
        if first.vision is not None:
            has_tower = first.pre_process
            pack.pictures = make_pictures(micro, first.vision, places, shared, self.device, has_tower=has_tower)
        copies = np.pad(copies_of_rows(micro), (0, pack.rows - len(micro.tokens)))
        temperature = micro.temperature
        return MicroBatchInputs(
            micro,
            pack,
            copies[places],
            to_device((places >= len(micro.tokens))[None], self.device),
            None if temperature is None or (temperature == 1).all() else to_device(temperature, self.device),
            self._experts(micro, pack),
            {},
        )

    def _key_rows(self, work: MicroBatchInputs) -> None:
        """Give a pack the keys of its rows, by which masks of dropout are drawn."""
        pack = work.pack
        keys = np.pad(micro_keys(work.micro), (0, pack.rows - len(work.micro.tokens)))
        shared, local = self._rows(pack)
        pack.row_keys = tuple(to_device(keys[rows], self.device) for rows in (shared, local))

    def _rows(self, pack: Pack) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A pack's rows of this context-parallel rank, and those of them that it has between layers."""
        config = self.stage.config
        tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
        cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        shared = owned(pack.rows, cp, rank)
        return shared, shared.reshape(tp, -1)[parallel_state.get_tensor_model_parallel_rank() if tp > 1 else 0]

    def _experts(self, micro: MicroBatch, pack: Pack) -> NDArray[np.int16] | None:
        if self.routers is None or self.routed is None or not self.routers.replays:
            return None
        return self.routers.rows(self.routed, micro, pack)

    def _score(self, work: MicroBatchInputs, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The stage's ``score`` of all response tokens of the micro-batch, [R] each, on all context-parallel ranks."""
        pack = work.pack
        assert pack.local is not None
        target = to_device(work.micro.target, self.device)
        temperature = work.temperature[pack.local] if work.temperature is not None else None
        local: tuple[torch.Tensor, ...] = self.stage.chunks[-1].score(
            hidden, pack, target[pack.local], temperature, chunk=self.chunk
        )
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return local
        return tuple(_Spread.apply(x, pack.local, len(target), group) for x in local)

    def _one(self) -> torch.Tensor:
        """The number of tokens that megatron-core would divide by; weights are already those of the whole step."""
        return torch.ones((), dtype=torch.int, device=self.device)


def speaks() -> bool:
    """Whether this rank counts for its data-parallel rank: the last stage's first rank of both other kinds."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def totals(sums: LossSums) -> tuple[dict[str, float], list[int]]:
    """A step's sums over all data-parallel ranks, and the samples whose loss is not finite; the same on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (sums.totals, sorted(sums.bad)))
    values: dict[str, float] = {}
    for sums_of_rank, _ in everyone:
        for name, number in sums_of_rank.items():
            values[name] = values.get(name, 0.0) + number
    return values, sorted({sample for _, bad in everyone for sample in bad})


class _Spread(torch.autograd.Function):
    """Values of the rows that each context-parallel rank has, [r], to all of them on every rank, [R].

    Every rank computes the same of the whole, so the gradient of its own rows is already complete: nothing is summed.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(rows)
        whole = local.new_zeros(count)
        whole[rows] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None, None
