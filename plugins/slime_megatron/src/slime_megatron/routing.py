"""Routing replay of a pipeline stage, at the place that megatron-core's routers have for it (``router_replay``).

    rows of a pack -> filled up, cut as the pack is (`packing`), then for sequence parallelism -> a layer's rows
    forward: rows of the micro-batch; kept -> the same, where its layers are made again in the backward pass

Micro-batches go backward in the order in which they went forward, in each chunk of layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state

from slime_core.errors import ConfigError
from slime_core.weights.routers import NOT_CHOSEN, RouterChoice, differences
from slime_megatron.packing import owned

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from numpy.typing import NDArray

    from slime_core.trainers.routing import RoutingReplay, Source
    from slime_core.types import Batch, MicroBatch
    from slime_megatron.model import ModelStage
    from slime_megatron.packing import Pack


@dataclass(slots=True, frozen=True)
class RoutedPass:
    """What passes over the micro-batches of ``batch`` replay."""

    routing: RoutingReplay
    batch: Batch
    source: Source


class LayerReplay:
    """The ``router_replay`` of one layer's router: it replays, or records, while it is ``active``."""

    def __init__(self, experts: int, top_k: int) -> None:
        self.choice = RouterChoice(experts, top_k)
        self.active = False
        self.keeps = False  # rows for the backward pass
        self.rows: torch.Tensor | None = None  # [N, k] of the micro-batch that goes forward
        self.waiting: deque[torch.Tensor | None] = deque()  # of those that have not gone backward

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts [N, k]; ``choose`` is megatron-core's own top-k."""
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if not self.active:
            return values, experts
        if torch._C._current_graph_task_id() != -1:  # the layer is made again
            self.choice.rows = self.waiting.popleft()
        else:
            self.choice.rows = self.rows
            if self.keeps:
                self.waiting.append(self.rows)
        return self.choice.choose(scores, values, experts)


class StageRouters:
    """The routers of a rank's stage, by layer of the whole model.

    Raises:
        ConfigError: CFG04, a model without experts, or routers whose choice megatron-core does not let replace.
    """

    def __init__(self, stage: ModelStage) -> None:
        self.config = stage.config
        _check(self.config)
        self.replays: dict[int, LayerReplay] = {}
        for layer, router in stage.routers().items():
            replay = LayerReplay(self.config.num_moe_experts, self.config.moe_router_topk)
            router.router_replay = self.replays[layer] = replay

    @property
    def layers(self) -> list[int]:
        """Of the whole model, those with experts."""
        frequency = self.config.moe_layer_freq
        pattern = (
            frequency if isinstance(frequency, list) else [n % frequency == 0 for n in range(self.config.num_layers)]
        )
        return [number for number, has_experts in enumerate(pattern) if has_experts]

    def rows(self, routed: RoutedPass, micro: MicroBatch, pack: Pack) -> NDArray[np.int16] | None:
        """[N, local layers, k] of this rank's rows of a pack; None where nothing is replayed."""
        if routed.source == "recorded":
            return routed.routing.recorded(micro)
        if routed.source != "engine":
            return None
        rows = routed.routing.rows(routed.batch, micro)
        filling = ((0, pack.rows - len(rows)), (0, 0), (0, 0))
        cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        rows = np.pad(rows, filling, constant_values=NOT_CHOSEN)[owned(pack.rows, cp, rank)]
        if self.config.sequence_parallel:
            tp = parallel_state.get_tensor_model_parallel_world_size()
            rows = np.split(rows, tp)[parallel_state.get_tensor_model_parallel_rank()]
        every = self.layers
        return rows[:, [every.index(layer) for layer in self.replays]]

    def forward(self, rows: torch.Tensor | None) -> None:
        """Replay these rows in the next forward pass of a chunk."""
        for place, replay in enumerate(self.replays.values()):
            replay.rows = None if rows is None else rows[:, place]

    def chosen(self, chunk: Any) -> dict[int, torch.Tensor]:
        """By layer, what the routers of a chunk chose in its last pass, [N, k] int16 in host memory."""
        layers = {module.layer_number - 1 for module in chunk.modules() if hasattr(module, "self_attention")}
        return {n: r.choice.chosen.short().cpu() for n, r in self.replays.items() if n in layers}  # type: ignore[union-attr]

    @contextmanager
    def active(self, *, keeps: bool) -> Iterator[None]:
        """Replay or record in the passes of the block; ``keeps``: they go backward too."""
        keeps = keeps and self.config.recompute_granularity is not None
        for replay in self.replays.values():
            replay.active, replay.keeps = True, keeps
        try:
            yield
        finally:
            for replay in self.replays.values():
                replay.active, replay.rows, replay.choice.rows = False, None, None
                replay.waiting.clear()

    def differences(self) -> tuple[int, int]:
        """See `weights.routers.differences`."""
        return differences(replay.choice for replay in self.replays.values())


def _check(config: TransformerConfig) -> None:
    if not config.num_moe_experts:
        raise _not_replayed("the model has no experts", "--routing-replay off")
    if config.moe_router_fusion:
        raise _not_replayed("the fused router chooses by itself", "--no-moe-router-fusion")
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise _not_replayed("sinkhorn chooses for all tokens at once", "--moe-router-load-balancing-type none")


def _not_replayed(why: str, fix: str) -> ConfigError:
    problem = "experts cannot be replayed with Megatron here"
    return ConfigError(problem, code="CFG04", where="train.routing_replay", why=why, fix=fix)
