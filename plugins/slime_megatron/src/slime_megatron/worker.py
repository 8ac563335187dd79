"""One rank of the Megatron trainer: its stage of each model, and how they pass, learn and are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from slime_convert.bridges import find_bridge
from slime_core.context import Context
from slime_core.kernels.quantised import stored_parts
from slime_core.lora.folder import to_peft
from slime_core.seeds import seed_of
from slime_core.trainers.data_parallel import DataParallelRank, RankBatch
from slime_core.trainers.optimizer_step import LossSums
from slime_core.trainers.routing import RoutingReplay
from slime_core.trainers.verify import Slow
from slime_core.trainers.worker import Tensors, Worker
from slime_core.types import AdapterUpdate
from slime_core.weights.flops import Flops
from slime_core.weights.transports.buckets import stream
from slime_megatron import exporting, restoring, saving, verify
from slime_megatron.balance import watch
from slime_megatron.critic import MegatronCritic
from slime_megatron.fingerprint import base_sums, fingerprint
from slime_megatron.frozen import MegatronFrozen
from slime_megatron.learner import MegatronLearner
from slime_megatron.model import Model, build_model
from slime_megatron.others import ModelContext
from slime_megatron.passes import speaks, totals
from slime_megatron.places import check_shapes
from slime_megatron.routing import RoutedPass, StageRouters
from slime_megatron.settings import MegatronSettings, build, settings
from slime_megatron.smaller import smaller
from slime_megatron.state import start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.lora.folder import Factors
    from slime_core.protocols import Role
    from slime_core.trainers.optimizer_step import Schedule
    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.transports.buckets import TensorSource
    from slime_megatron.lora import StageAdapter


class MegatronWorker(Worker):
    """See `MegatronTrainer`, whose calls these are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bridge = find_bridge(self.plugins.loaded, self.folder.config)
        self.settings: MegatronSettings = self._settings(self.config)
        self.ctx = Context(config=self.config)
        layout = self.settings.layout
        start(layout, self.config.seed)
        number = parallel_state.get_data_parallel_rank()
        self.dp_rank = DataParallelRank(
            number=number,
            size=layout.dp,
            context_parallel=layout.cp,
            flops=Flops.of(self.folder.config, frozen_tower=self.train.freeze_vision_tower),
            multiple=self.settings.pack_multiple,
            tokens=self.default_tokens(fused=False, ranks=layout.tp),
        )
        self.plugins.notify("slime_megatron_init", "a Megatron rank's start", self.ctx, args=self.settings)
        self.policy: Model = build_model(self.settings, self.bridge, self.folder, self.device, seed=self.config.seed)
        adapters: Mapping[str, StageAdapter | None] = self.policy.adapters or {"": None}
        self._actors = {name: MegatronLearner(self.policy.stage, adapter) for name, adapter in adapters.items()}
        for actor in self._actors.values():
            actor.wrap(build(self.settings))
        self.actor: MegatronLearner = next(iter(self._actors.values()))
        self.policy.learn(self.actor.wrapped)
        self.expert_load = self.policy.passes.expert_load = watch(self.policy.stage)
        if self.train.routing_replay != "off":
            self.policy.passes.routers = StageRouters(self.policy.stage)
        self.frozen: MegatronFrozen = MegatronFrozen(self.folder)
        self.run: ModelContext

    def _settings(self, config: Config) -> MegatronSettings:
        """Of the policy, in a run's config or a stage's."""
        table = config.table("megatron")
        return settings(self.bridge, self.folder.config, table, self.train, self.world, self.device.type)

    def prepare_stage(self) -> None:
        assert self.stage is not None
        self.ctx = Context(config=self.stage)
        self.policy.passes.chunk = self.train.logprob_chunk_tokens
        self.settings = self._settings(self.stage)
        table, layers = self.stage.table("megatron"), self.settings.sizes.layers
        self.run = ModelContext(
            table, self.train, self.world, self.device, layers, partial(find_bridge, self.plugins.loaded)
        )

    def make_critic(self) -> MegatronCritic:
        return MegatronCritic(self.train.critic_load, self.folder, self.policy, self.settings, self.run)

    def begin_models(self, schedule: Schedule, steps: int, needs: frozenset[Role]) -> None:
        for actor in self.actors.values():
            actor.begin(self.train, schedule, build(self.settings))
        if self.critic is not None:
            self.critic.begin(self.train, steps, self.settings, self.run)
        self.frozen.begin(needs, self.train, self.policy, self.run)
        for one in saving.learned(self):
            check_shapes(one.tensors.entries)

    @property
    def actors(self) -> dict[str, MegatronLearner]:
        return self._actors

    @contextmanager
    def adapter_of(self, batch: Batch) -> Iterator[None]:
        actor = self.actor
        named = self._actors.get((batch.models or [""])[0], actor)
        with named.adapter.in_use() if named.adapter is not None else nullcontext():
            self._step_by(named)
            try:
                yield
            finally:
                self._step_by(actor)

    def _step_by(self, actor: MegatronLearner) -> None:
        """Passes add gradients to a learner's from now on."""
        self.actor = actor
        self.policy.learn(actor.wrapped)

    def columns(self, rank_batch: RankBatch, model: Model, role: Role, count: int) -> NDArray[np.float32]:
        columns = torch.zeros(count, len(rank_batch.batch.loss_mask), dtype=torch.float32, device=self.device)
        self.plugins.notify(
            "slime_megatron_before_log_prob",
            f"log-probs of {role}",
            replace(self.ctx, version=self.version),
            model=list(model.passes.wrapped),
            role=role,
        )
        micros = list(chain(*self.packs(rank_batch)))
        with self._routed(rank_batch, role if model is self.policy else ""):
            scores = model.passes.scores(micros)
        if speaks():
            for micro, rows in zip(micros, scores, strict=True):
                columns[:, torch.from_numpy(micro.response).to(self.device)] = torch.stack(rows)
        return columns.cpu().numpy()

    def log_probs_in(self, rank_batch: RankBatch, dtype: torch.dtype) -> Columns:
        return verify.log_probs_in(self, rank_batch, dtype)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        with self.frozen.as_reference(self.policy):
            yield

    def run_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        self._ready(self.actor)
        with self._routed(sums.rank_batch, "train"), self._dropping():
            self.policy.passes.backward(micros, self.loss, self.train, sums)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """The policy's passes with gradients inside the block drop inputs of the adapter in use."""
        adapter, passes = self.policy.adapter, self.policy.passes
        if adapter is not None and self.train.lora_dropout:
            adapter.switch.dropout.seed = seed_of(self.config.seed, "dropout", self.actor.steps)
            passes.drops = True
        try:
            yield
        finally:
            passes.drops = False

    @contextmanager
    def _routed(self, rank_batch: RankBatch, role: str) -> Iterator[None]:
        """The policy's passes inside the block replay experts, or record them."""
        routing, passes = self.routing, self.policy.passes
        source = routing.source(rank_batch.batch, role) if routing is not None else "none"
        if routing is not None and source != "none":
            passes.routed = RoutedPass(routing, rank_batch.batch, source)
        try:
            yield
        finally:
            passes.routed = None

    def make_routing(self) -> RoutingReplay:
        routers, kind = self.policy.passes.routers, self.train.routing_replay
        assert routers is not None
        top_k, experts = routers.config.moe_router_topk, routers.config.num_moe_experts
        return RoutingReplay(kind, self.segments, routers.layers, top_k, experts)

    def routing_differences(self) -> tuple[int, int]:
        routers = self.policy.passes.routers
        return routers.differences() if routers is not None else (0, 0)

    def critic_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        self._ready(self.critic.learner)
        self.critic.backward(micros, sums)

    def _ready(self, learner: MegatronLearner) -> None:
        learner.ready()
        self.plugins.notify(
            "slime_megatron_before_train_step",
            f"optimizer step {learner.steps}",
            replace(self.ctx, version=self.version),
            model=learner.wrapped,
            optimizer=learner.optimizer,
            step=learner.steps,
        )

    def finish(self, sums: LossSums) -> tuple[dict[str, float], list[int]]:
        return totals(sums)

    def settle(self) -> None:
        for learner in self.learners():
            learner.settle()

    def speaks(self) -> bool:
        return speaks()

    def gradients(self, rank_batch: RankBatch, micros: list[MicroBatch]) -> tuple[float, Tensors]:
        return verify.gradients(self, rank_batch, micros)

    def slow_model(self) -> Any:
        return verify.slow_copy(self)

    def slow_way(self) -> Slow:
        slow = super().slow_way()
        return verify.named(slow) if self.policy.adapter is None else slow

    def smaller(self) -> Sequence[str]:
        return smaller(self.settings)

    def sources(self) -> list[TensorSource]:
        self.settle()
        return self.policy.sources()

    def storage(self) -> tuple[str, Tensors]:
        """See `Publisher`; one rank hands over what it computes with, and copies of what it has in another order."""
        if self.world > 1 or self.block_format or self.policy.adapter is not None:
            return super().storage()
        return "tensors", {part.name: part.cut(one) for parts, one in stream(self.sources()) for part in parts}

    def base_sums(self) -> dict[str, list[int]]:
        return base_sums(self.policy.tensors) if self.policy.adapter is not None else {}

    def whole_adapters(self) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Factors]]]:
        adapters, base = self.policy.adapters, self.config.rollout.hf_checkpoint
        if adapters:
            self.settle()
        return {name: (adapter.spec.to_peft(base), adapter.factors()) for name, adapter in adapters.items()}

    def adapter_updates(self) -> dict[str, AdapterUpdate]:
        if self.train.lora_sync == "merged":
            return {}
        whole = self.whole_adapters().items()
        return {name: AdapterUpdate(config=config, tensors=to_peft(factors)) for name, (config, factors) in whole}

    def unmerged(self) -> AbstractContextManager[None]:
        adapter = self.policy.adapter
        return adapter.switch.base() if adapter is not None else nullcontext()

    def reserve(self) -> None:
        saving.reserve(self)

    def save(self, path: Path) -> None:
        self.begun_stage()
        self.base.check(f"checkpoint after step {self.version + 1}")
        saving.save(self, path)

    def read(self, path: Path) -> None:
        restoring.restore(self, path)

    def checksum(self) -> str:
        self.begun_stage()
        return fingerprint(self)

    def write_folder(self, path: Path) -> None:
        exporting.export(self, path)

    def _tensors(self, what: str) -> Iterator[torch.Tensor]:
        """What a name of `release` stands for, on this rank's device."""
        learners = self.learners()
        if what == "parameters":
            stages = dict.fromkeys(learner.stage for learner in learners)  # adapters share one
            parameters = (p.detach() for stage in stages for p in stage.parameters())
            tensors = [*(part for p in parameters for part in stored_parts(p)), *self.frozen.tensors()]
        elif what == "optimizer":
            tensors = [tensor for learner in learners for tensor in learner.states()]
        else:
            tensors = [tensor for learner in learners for tensor in learner.gradients()]
        return (tensor for tensor in tensors if tensor.device.type == self.device.type)
