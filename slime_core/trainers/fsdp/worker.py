"""One rank of the FSDP2 trainer: its sharded models, and how they pass, learn and are stored."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.kernels.quantised import stored_parts
from slime_core.lora.effective import put_on
from slime_core.trainers.base_checksums import Sums, sums_of
from slime_core.trainers.data_parallel import DataParallelRank, RankBatch
from slime_core.trainers.fsdp import checkpoint, publishing
from slime_core.trainers.fsdp.adapters import (
    MergedWeights,
    ServedWeights,
    adapt,
    dropout,
    peft_tensors,
    rounded_on,
    whole_factors,
    without_dropout,
)
from slime_core.trainers.fsdp.critic import FsdpCritic
from slime_core.trainers.fsdp.exact import ExactPass, fixed_sums
from slime_core.trainers.fsdp.experts import router_biases, watch
from slime_core.trainers.fsdp.frozen import FsdpFrozen
from slime_core.trainers.fsdp.model import FsdpLearner, FsdpPolicy, backward, fingerprint, forward, shard
from slime_core.trainers.fsdp.packs import RankPack
from slime_core.trainers.fsdp.places import DevicePlace, HostPlace
from slime_core.trainers.fsdp.precision import in_dtype
from slime_core.trainers.fsdp.ranks import FsdpRanks
from slime_core.trainers.fsdp.shards import full, local, own_runs, reshard
from slime_core.trainers.optimizer_step import LossSums, to_device
from slime_core.trainers.rank_grid import RankGrid
from slime_core.trainers.routing import RoutingReplay
from slime_core.trainers.verify import slow_model
from slime_core.trainers.worker import Tensors, Worker
from slime_core.types import AdapterUpdate
from slime_core.weights.flops import Flops
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.routers import NOT_CHOSEN, Routers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from slime_core.lora.folder import Factors
    from slime_core.protocols import Role
    from slime_core.trainers.optimizer_step import Schedule
    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.transports.buckets import TensorPart, TensorSource


class FsdpWorker(Worker):
    """See `FsdpTrainer`, whose calls these are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        grid = RankGrid.of(self.config, self.world)
        self.ranks = FsdpRanks(grid, self.rank, self.device.type)
        model = self._model()
        self.layout = FolderLayout(model)
        adapters = adapt(model, self.train, self.config.seed)
        self.policy: FsdpPolicy = FsdpPolicy(model, chunk=self.train.logprob_chunk_tokens, adapters=adapters)
        self.served = ServedWeights()
        self._try_model()
        self.policy.freeze(self.train)
        self.policy.share_packs(self.ranks)
        if self.train.routing_replay != "off":
            self.policy.routers = Routers(self.policy.hf)
        if self.train.true_on_policy_mode:
            self.policy.exact = ExactPass(self.policy)
        self.policy.choose_compiling(self.train.compile)
        self.expert_load = self.policy.expert_load = watch(self.policy.hf)
        self.place = HostPlace(self.device) if self.train.fsdp_cpu_offload else DevicePlace()
        shard(self.policy, self.ranks, self.dtype, place=self.place)
        names = adapters.names if adapters is not None else ("",)
        self._actors = {name: FsdpLearner(self.policy, self.rank, self.world, adapter=name) for name in names}
        self.actor: FsdpLearner = self._actors[names[0]]
        self.frozen: FsdpFrozen = FsdpFrozen(self.folder, self.ranks, self.dtype, self.device)
        self.dp_rank = DataParallelRank(
            number=self.ranks.data,
            size=grid.data,
            flops=Flops.of(self.folder.config, frozen_tower=self.train.freeze_vision_tower),
            context_parallel=grid.context,
            tokens=self.default_tokens(fused=self.policy.fused and self.policy.exact is None),
        )

    def _model(self) -> Any:
        """transformers' model on the device: float32 where it is trained, in the dtype of compute under adapters.

        Weights go there one at a time, and are rounded there where the base has fewer bits.
        """
        name = self.train.dtype if self.train.lora_rank else "float32"
        put = rounded_on(self.device, self.folder, self.train.base_weights)
        model: Any = self.folder.build_model(name, self.config.seed, put=put)
        return model.to(self.device).eval().requires_grad_(True)

    def _try_model(self) -> None:
        """Try what the model can do, in float32: a layer at a time where its base is in half precision."""
        if self.policy.adapters is None or self.dtype == torch.float32:
            self.policy.try_model()
            return
        with in_dtype(self.policy, torch.float32) as trial:
            trial.try_passes()
            self.policy.packs, self.policy.linear_head = trial.packs, trial.linear_head
        self.policy.try_fused()

    def prepare_stage(self) -> None:
        self.policy.chunk = self.train.logprob_chunk_tokens
        self.policy.choose_recomputing(self.train)

    def speaks(self) -> bool:
        return self.ranks.number == 0

    def make_critic(self) -> FsdpCritic:
        return FsdpCritic(
            self.train,
            self.actor,
            self.folder,
            self.ranks,
            seed=self.config.seed,
            dtype=self.dtype,
            device=self.device,
            place=self.place,
        )

    def begin_models(self, schedule: Schedule, steps: int, needs: frozenset[Role]) -> None:
        for actor in self.actors.values():
            actor.begin(self.train, schedule)
        if self.critic is not None:
            self.critic.begin(self.train, steps)
        self.frozen.begin(needs, self.train, self.actor)

    def columns(self, rank_batch: RankBatch, model: FsdpPolicy, role: Role, count: int) -> NDArray[np.float32]:
        columns = torch.zeros(count, len(rank_batch.batch.loss_mask), dtype=torch.float32, device=self.device)
        for micro in chain(*self.packs(rank_batch, model)):
            if role == "values":
                rows: tuple[torch.Tensor, ...] = (self.critic.values(micro),)
            else:
                with self._routed(rank_batch, micro, role):
                    rows = forward(model, micro, self._temperature(micro), self.device)
            where = to_device(micro.response, self.device)
            for column, row in zip(columns, rows):
                column[where] = row.float()
        reshard(model)
        return columns.cpu().numpy()

    def log_probs_in(self, rank_batch: RankBatch, dtype: torch.dtype) -> Columns:
        with in_dtype(self.policy, dtype) as policy:
            return {"log_probs": self.columns(rank_batch, policy, "policy", 2)[0]}

    def as_reference(self) -> AbstractContextManager[None]:
        return self.frozen.as_reference(self.actor)

    def run_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        with fixed_sums(self.policy.exact is not None):
            for micro in micros:
                with self._routed(sums.rank_batch, micro, "train"), self._dropping(micro):
                    backward(self.policy, self.loss, self.train, micro, self._temperature(micro), sums)
        self.policy.sum_lanes()

    def _dropping(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Passes over a micro-batch inside the block drop inputs of adapters."""
        pack = RankPack(micro, self.device, self.policy.ranks)
        return dropout(self.policy.adapters, pack, self.config.seed, self.actor.optimizer.steps)

    @contextmanager
    def _routed(self, rank_batch: RankBatch, micro: MicroBatch, role: str) -> Iterator[None]:
        """The policy's passes over a micro-batch inside the block replay experts, or record them."""
        routing, routers = self.routing, self.policy.routers
        source = routing.source(rank_batch.batch, role) if routing is not None else "none"
        if routing is None or routers is None or source == "none":
            yield
            return
        pack = RankPack(micro, self.device, self.policy.ranks)
        if source == "record":
            with routers.recording():
                yield
            chosen = routers.rows()
            chosen[torch.from_numpy(pack.behind).to(chosen.device)] = NOT_CHOSEN
            routing.record(micro, chosen)
            return
        if source == "recorded":
            rows = routing.recorded(micro)
        else:
            rows = pack.of_rows(routing.rows(rank_batch.batch, micro), NOT_CHOSEN)
        with routers.replaying(to_device(rows, self.device)):
            yield

    def make_routing(self) -> RoutingReplay:
        assert self.policy.routers is not None
        routers, kind = self.policy.routers, self.train.routing_replay
        return RoutingReplay(kind, self.segments, routers.layers, routers.shape[1], routers.choices[0].experts)

    def routing_differences(self) -> tuple[int, int]:
        return self.policy.routers.differences() if self.policy.routers is not None else (0, 0)

    def critic_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        with fixed_sums(self.policy.exact is not None):
            self.critic.backward(micros, sums)

    def finish(self, sums: LossSums) -> tuple[dict[str, float], list[int]]:
        return sums.finish(self.world)

    def _temperature(self, micro: MicroBatch) -> torch.Tensor | None:
        """Of each response token's draw; None where all are 1."""
        if micro.temperature is None or (micro.temperature == 1).all():
            return None
        return to_device(micro.temperature, self.device)

    def gradients(self, rank_batch: RankBatch, micros: list[MicroBatch]) -> tuple[float, Tensors]:
        sums = LossSums(rank_batch, self.device)
        with without_dropout(self.policy.adapters):
            self.run_backward(micros, sums)
        loss = self.finish(sums)[0]["loss"]
        grads, sums_of = {}, self.actor.gradients()
        for name, parameter in self.actor.parameters().items():
            grad = sums_of[name] if name in sums_of else torch.zeros_like(parameter)
            grads[name] = full(grad.detach()).double().cpu()
        self.zero_grad()
        return loss, grads

    def slow_model(self) -> Any:
        weights = {name: full(p.detach()) for name, p in self.policy.base().items()}
        with torch.random.fork_rng(devices=[]):
            built: Any = self.folder.build_model("float32", attn_implementation="eager")
        model = slow_model(built, self.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
            for name, bias in router_biases(model).items():
                bias.copy_(self.actor.biases()[name])
        if self.policy.adapters is not None:
            values = {name: full(p.detach()) for name, p in self.actor.parameters().items()}
            put_on(model, self.policy.adapters, self.actor.adapter, values)
            return model
        for name in self.policy.frozen():
            model.get_parameter(name).requires_grad_(False)
        return model

    def smaller(self) -> Sequence[str]:
        if not self.train.gradient_checkpointing:
            return ("train.gradient_checkpointing=true",)
        some = self.train.gradient_checkpointing_layers
        return (f"train.gradient_checkpointing_layers=0   (it is {some}; 0 is all)",) if some else ()

    def storage(self) -> tuple[str, Tensors]:
        """See `Worker.storage`; one rank hands over the live storage that it computes with.

        Weights with adapters are then merged into storage of their own.
        """
        if self.world > 1 or self.block_format:
            return super().storage()
        tensors, adapters = self.policy.hf.state_dict(), self.policy.adapters
        if adapters is not None and adapters.active is not None:
            tensors = self.served.refreshed(tensors, self.policy.merged(), adapters)
        elif adapters is not None:
            tensors = {name: one for name, one in tensors.items() if name not in adapters.parameters()}
        return "shared", tensors

    def adapter_updates(self) -> dict[str, AdapterUpdate]:
        adapters = self.policy.adapters
        if adapters is None or self.train.lora_sync == "merged":
            return {}
        config = adapters.spec.to_peft(str(self.folder.path))
        return {name: AdapterUpdate(config=config, tensors=peft_tensors(adapters, name)) for name in adapters.names}

    def unmerged(self) -> AbstractContextManager[None]:
        adapters = self.policy.adapters
        return adapters.using(None) if adapters is not None else nullcontext()

    def sources(self) -> list[TensorSource]:
        reshard(self.policy)
        weights = MergedWeights(self.policy.adapters, self.policy.base() | publishing.stored_buffers(self.policy.hf))
        sources = publishing.sources_of(weights, self.device, self.parts)
        publishing.check_names(self.layout, sources, self.folder)
        return sources

    def parts(self, name: str, shape: torch.Size) -> tuple[TensorPart, ...]:
        return self.layout.parts(name, shape)

    def whole(self) -> Tensors:
        """Every tensor of the model's state on rank 0, tied names as one tensor; nothing on the others."""
        parameters, adapters = self.policy.all_names(), self.policy.adapters
        outside = adapters.parameters() if adapters is not None else {}
        state = {name: tensor for name, tensor in self.policy.hf.state_dict().items() if name not in outside}
        weights = MergedWeights(adapters, state | parameters)
        gathered: dict[Any, torch.Tensor] = {}
        tensors: Tensors = {}
        for name in weights.parameters:
            owner = id(parameters.get(name, name))
            if owner not in gathered:
                one = weights.whole(name)
                gathered[owner] = one.cpu().contiguous() if self.rank == 0 else torch.empty(0)
            tensors[name] = gathered[owner]
        return tensors if self.rank == 0 else {}

    def reserve(self) -> None:
        checkpoint.reserve(self)

    @property
    def actors(self) -> dict[str, FsdpLearner]:
        return self._actors

    @contextmanager
    def adapter_of(self, batch: Batch) -> Iterator[None]:
        adapters, actor = self.policy.adapters, self.actor
        if adapters is None or len(adapters.names) == 1:
            yield
            return
        name = (batch.models or [""])[0] or adapters.names[0]
        self.actor = self.actors[name]
        try:
            with adapters.using(name):
                yield
        finally:
            self.actor = actor

    def save(self, path: Path) -> None:
        self.base.check(f"checkpoint after step {self.version + 1}")
        checkpoint.save(self, path)

    def base_sums(self) -> Sums:
        if self.policy.adapters is None:
            return {}
        base = self.policy.base()
        copies = {name for name, parameter in base.items() if self.policy.copy_of(name, parameter)[0]}
        return sums_of(own_runs(base | self.actor.biases(), self.world, copies), self.world)

    def whole_adapters(self) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Factors]]]:
        adapters = self.policy.adapters
        if adapters is None:
            return {}
        config = adapters.spec.to_peft(self.config.rollout.hf_checkpoint)
        return {name: (config, whole_factors(adapters, name, keep=self.rank == 0)) for name in adapters.names}

    def read(self, path: Path) -> None:
        checkpoint.restore(self, path)

    def checksum(self) -> str:
        tensors, copies = self.actor.biases(), self.policy.copies()
        for actor in self.actors.values():
            tensors |= actor.parameters()
        if self.critic is not None:
            values = self.critic.learner
            tensors |= {f"critic.{name}": tensor for name, tensor in (values.parameters() | values.biases()).items()}
            copies |= {f"critic.{name}" for name in self.critic.model.copies()}
        return fingerprint(tensors, self.world, copies)

    def write_folder(self, path: Path) -> None:
        adapters = self.policy.adapters
        with adapters.using(adapters.names[0]) if adapters is not None else nullcontext():
            whole = self.whole()
        if self.rank == 0:
            checkpoint.write_folder(path, self.policy.hf, whole, self.folder.tokenizer())

    def _tensors(self, what: str) -> Iterable[torch.Tensor]:
        """What a name of `release` stands for, this rank's shards of it; gradients are forgotten instead."""
        return [tensor for tensor in self._state(what) if tensor.device.type == self.device.type]

    def _state(self, what: str) -> list[torch.Tensor]:
        if what == "parameters":
            models = [learner.module for learner in self.learners()]
            shards = [local(p.detach()) for learner in self.learners() for p in learner.parameters().values()]
            copies = [p.detach() for model in models if model.masters for p in model.masters.copies.values()]
            frozen = self.policy.base().values() if self.policy.adapters else ()
            base = [part for p in frozen for part in stored_parts(local(p.detach()))]
            return [*shards, *copies, *base, *self.served.tensors(), *self.frozen.tensors()]
        return [tensor for learner in self.learners() for tensor in learner.states()] if what == "optimizer" else []
