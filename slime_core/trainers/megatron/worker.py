"""One rank's stage of the policy, its optimizer and its stage; methods take part in every collective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.config.algorithms import settle
from slime_core.context import Context
from slime_core.errors import TrainerError
from slime_core.trainers import checks
from slime_core.trainers.meeting import meet
from slime_core.trainers.megatron.learner import Learner
from slime_core.trainers.megatron.model import Model, build_model
from slime_core.trainers.megatron.passes import speaks, totals
from slime_core.trainers.megatron.settings import Settings, build, settings
from slime_core.trainers.megatron.state import start
from slime_core.trainers.pack import pack
from slime_core.trainers.prepare import prepared
from slime_core.trainers.schedule import Schedule, optimizer_steps
from slime_core.trainers.share import Sums
from slime_core.trainers.steps import Guard, Outcome, summary
from slime_core.types import WeightUpdate
from slime_core.weights.transports.buckets import stream
from slime_core.weights.transports.senders import Senders

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Loss, Role
    from slime_core.transfer import WeightRoute
    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.folder import ModelFolder

Tensors = dict[str, torch.Tensor]


class Worker:
    """See `MegatronTrainer`, whose calls these are."""

    def __init__(
        self,
        config: Config,
        plugins: Plugins,
        folder: ModelFolder,
        rank: int,
        world: int,
        device: str,
        rendezvous: str | Path | None,
        errors: Path | None = None,
    ) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.plugins, self.folder, self.config = plugins, folder, config
        dtype = config.train.dtype if config.train.dtype != "auto" else _dtype(self.device)
        self.train = config.train.model_copy(update={"dtype": dtype})
        self.bridge = plugins.bridge(folder.config)
        self.settings: Settings = settings(
            self.bridge, folder.config, config.megatron, self.train, world, self.device.type
        )
        self.ctx = Context(config=config)
        meet(rank, world, device, rendezvous)
        start(self.settings.layout, config.seed)
        plugins.megatron.init(self.settings, self.ctx)
        self.policy: Model = build_model(self.settings, self.bridge, folder, self.device, seed=config.seed)
        self.actor = Learner(self.policy.stage)
        self.actor.wrap(build(self.settings))
        self.policy.learn(self.actor.ddp)
        self.reference: Tensors | None = None
        self.guard = Guard(errors=errors if rank == 0 else None)
        self.senders = Senders(self.device, folder.path)
        self.stage: Config | None = None
        self.steps = 0  # calls of step in this stage
        self.loss: Loss

    def begin(self, stage: Config) -> None:
        train = settle(stage.train)
        dtype = train.dtype if train.dtype != "auto" else self.train.dtype
        if dtype != self.train.dtype:
            raise TrainerError(
                "stages compute in different dtypes",
                where="train.dtype",
                fix="set train.dtype for the run, not in a [[stage]]",
            )
        self.train = train.model_copy(update={"dtype": dtype})
        stage = stage.model_copy(update={"train": self.train})
        needs = self.plugins.needs(train)
        self.stage, self.loss, self.steps = stage, self.plugins.loss(train.loss_type), 0
        self.ctx = Context(config=stage)
        self.guard.most, self.guard.in_a_row = train.max_nonfinite_steps, 0
        self.policy.passes.chunk = train.logprob_chunk_tokens
        made = settings(self.bridge, self.folder.config, stage.megatron, self.train, self.world, self.device.type)
        schedule = Schedule(
            peak=train.lr,
            low=train.min_lr,
            style=train.lr_decay_style,
            warmup=train.lr_warmup_iters,
            decay=train.lr_decay_iters or optimizer_steps(stage),
        )
        self.actor.begin(self.train, schedule, build(made))
        self.reference = self._reference(train.ref_load) if "reference" in needs else None

    def _reference(self, path: str) -> Tensors:
        """This rank's shards of the reference: the policy as it is now, or ``ref_load``'s."""
        mine = self.policy.tensors.held
        if not path:
            return {name: held.tensor.detach().clone() for name, held in mine.items()}
        folder = checks.open_model("train.ref_load", path, self.folder)
        return self.policy.tensors.read(folder)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The policy computes with the reference's weights inside the block."""
        assert self.reference is not None
        mine = {name: held.tensor for name, held in self.policy.tensors.held.items()}
        kept = {name: tensor.detach().clone() for name, tensor in mine.items()}
        try:
            with torch.no_grad():
                for name, tensor in mine.items():
                    tensor.copy_(self.reference[name])
                self.policy.spread_embedding()
            yield
        finally:
            with torch.no_grad():
                for name, tensor in mine.items():
                    tensor.copy_(kept[name])
                self.policy.spread_embedding()

    def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        self._check(batch)
        found: dict[str, Columns] = {}
        for role in sorted(roles):
            self.plugins.megatron.before_log_prob([self.actor.ddp], role, self.ctx)
            if role in ("policy", "old_policy"):
                found[role] = self._score(batch, self.policy)
            elif role == "reference" and self.reference is not None:
                with self._as_reference():
                    found[role] = {"log_probs": self._score(batch, self.policy)["log_probs"]}
            else:
                raise TrainerError(f"this trainer holds no {role} model")
        return found

    def _score(self, batch: Batch, model: Model) -> Columns:
        columns = torch.zeros(2, len(batch.loss_mask), dtype=torch.float32, device=self.device)
        (micros,) = self._pack(batch, whole=True)
        found = model.passes.log_probs(micros)
        if speaks():
            for micro, (log_probs, entropy) in zip(micros, found, strict=True):
                where = torch.from_numpy(micro.response).to(self.device)
                columns[0, where], columns[1, where] = log_probs, entropy
        dist.all_reduce(columns)
        log_probs, entropy = columns.cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(log_probs))
        if bad.size:
            sample = checks.sample_at(batch, int(bad[0]))
            raise TrainerError(
                f"a log-prob of sample {sample} is {log_probs[bad[0]]}", code="TRN95",
                where=f"sample {sample}", why="the weights or a logit are not finite",
            )  # fmt: skip
        return {"log_probs": log_probs, "entropy": entropy}

    def step(self, batch: Batch) -> dict[str, float]:
        self._check(batch)
        missing = [name for name in self.loss.columns if name not in batch.columns]
        if missing:
            raise TrainerError(
                f"the batch has no column {missing[0]}, which the loss '{self.loss.name}' reads",
                why=f"it has {sorted(batch.columns)}",
            )
        assert self.stage is not None
        batch = prepared(batch, self.loss, self.stage.train)
        outcomes = [self._optimizer_step(batch, micros) for micros in self._pack(batch)]
        self.steps += 1
        return summary(outcomes, batch)

    def _optimizer_step(self, batch: Batch, micros: list[MicroBatch]) -> Outcome:
        """One optimizer step; nothing changes where a loss or gradient is not finite, or there is no gradient."""
        weight = self._sum(sum(float(m.weight.sum(dtype=np.float64)) for m in micros))
        if weight == 0:
            return Outcome("masked")
        self.actor.forget()
        self.plugins.megatron.before_train_step([self.actor.ddp], self.actor.optimizer, self.actor.steps, self.ctx)
        sums = Sums(batch.response_offsets, self.device)
        self.policy.passes.backward(micros, self.loss, self.train, sums)
        found, bad = totals(sums)
        norm = self.actor.norm()
        metrics = {n: v if n == "loss" else v / weight for n, v in found.items()} | {"grad_norm": norm}
        if bad or not math.isfinite(norm):
            self.actor.forget()
            return self.guard.skip(batch, bad, metrics.get("loss", 0.0), norm)
        self.guard.passed()
        metrics["lr"] = self.actor.update(norm) if norm else self.actor.rate
        self.actor.forget()
        return Outcome("made" if norm else "no_gradient", metrics)

    def _sum(self, mine: float) -> float:
        """The sum of a number over data-parallel ranks; the others of each hold the same micro-batches."""
        total = torch.tensor(mine if speaks() else 0.0, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def _pack(self, batch: Batch, whole: bool = False) -> list[list[MicroBatch]]:
        assert self.stage is not None
        train = self.stage.train
        return pack(
            batch,
            max_tokens=train.max_tokens_per_gpu * self.settings.layout.cp,
            num_steps=1 if whole else train.num_steps_per_rollout,
            global_batch_size=0 if whole else train.global_batch_size,
            aggregation=train.loss_aggregation,
            divisor=train.loss_divisor or self.stage.rollout.rollout_max_response_len,
            rank=parallel_state.get_data_parallel_rank(),
            world=self.settings.layout.dp,
        )

    def _check(self, batch: Batch) -> None:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) first")
        checks.compare_ranks(batch, self.rank, self.world)
        checks.check_batch(batch, self.folder.vocab_size)

    @torch.no_grad()
    def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        sources = self.policy.tensors.sources()
        if route is None:
            return WeightUpdate(version=version, epoch=0, transport="tensors", tensors=self.whole())
        update = WeightUpdate(version=version, epoch=0, transport=route.transport)
        tensors = stream(sources)
        try:
            if self.rank == 0:
                parts = [part for source in sources for part in source.parts]
                update.handle, update.fingerprints = self.senders.send(parts, tensors, version, route)
        finally:
            for _ in tensors:
                pass
        return update

    @torch.no_grad()
    def whole(self) -> Tensors:
        """Every tensor by its name in the model folder, float32 or as it is kept, on rank 0; nothing on the others."""
        found: Tensors = {}
        for parts, tensor in stream(self.policy.tensors.sources()):
            if self.rank == 0:
                found |= {part.name: part.cut(tensor).cpu().contiguous() for part in parts}
        return found

    def barrier(self) -> None:
        dist.barrier()


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"
