"""One rank's stage of the policy, its optimizer and its stage; methods take part in every collective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.config.algorithms import settle
from slime_core.context import Context
from slime_core.errors import TrainerError
from slime_core.trainers import checks, critic
from slime_core.trainers.dealing import check_portion, dealer_of
from slime_core.trainers.meeting import meet
from slime_core.trainers.micro import pack
from slime_core.trainers.parking import Parking
from slime_core.trainers.portion import Portion, Seat
from slime_core.trainers.schedule import Schedule, optimizer_steps
from slime_core.trainers.share import Guard, Outcome, Sums, summary
from slime_core.trainers.short import Passes, told_of_memory
from slime_core.trainers.staging import Staging
from slime_core.types import Batch, WeightUpdate
from slime_core.weights.flops import Flops
from slime_core.weights.transports.buckets import stream
from slime_core.weights.transports.senders import Senders
from slime_megatron import exporting, restoring, saving
from slime_megatron.critic import Critic
from slime_megatron.fingerprint import fingerprint
from slime_megatron.frozen import Frozen
from slime_megatron.learner import Learner
from slime_megatron.model import Model, build_model
from slime_megatron.others import Run
from slime_megatron.passes import speaks, totals
from slime_megatron.places import check_shapes
from slime_megatron.settings import Settings, build, settings
from slime_megatron.smaller import smaller
from slime_megatron.state import start
from slime_megatron.verify import log_probs_in, verify

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Loss, Role
    from slime_core.transfer import WeightRoute
    from slime_core.types import Columns, MicroBatch
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
            self.bridge, folder.config, config.table("megatron"), self.train, world, self.device.type
        )
        self.ctx = Context(config=config)
        meet(rank, world, device, rendezvous)
        start(self.settings.layout, config.seed)
        self.seat = Seat(
            number=parallel_state.get_data_parallel_rank(),
            ranks=self.settings.layout.dp,
            over=self.settings.layout.cp,
            flops=Flops.of(folder.config),
        )
        plugins.megatron.init(self.settings, self.ctx)
        self.policy: Model = build_model(self.settings, self.bridge, folder, self.device, seed=config.seed)
        self.actor = Learner(self.policy.stage)
        self.actor.wrap(build(self.settings))
        self.policy.learn(self.actor.ddp)
        self.frozen = Frozen(folder)
        self.critic: Critic | None = None
        self.parking = Parking(self._tensors)
        self.staging = Staging(self.device)
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
        self.staging.before_change()
        with self.parking.present():
            for learner in self.learners():
                learner.settle()
            self._begin_models(stage, needs)
            for one in saving.learned(self):
                check_shapes(one.tensors.entries)
            if self.device.type == "cuda" and stage.report.save_interval:
                saving.reserve(self)

    def _begin_models(self, stage: Config, needs: frozenset[Role]) -> None:
        train = self.train
        made = settings(self.bridge, self.folder.config, stage.table("megatron"), train, self.world, self.device.type)
        run = Run(stage.table("megatron"), train, self.world, self.device, made.sizes.layers, self.plugins.bridge)
        if "values" not in needs:
            self.critic = None
        elif self.critic is None or self.critic.path != train.critic_load:  # one of the stage before goes on
            self.critic = None  # its memory first
            self.critic = Critic(train.critic_load, self.folder, self.policy, made, run)
        schedule = Schedule(
            peak=train.lr,
            low=train.min_lr,
            style=train.lr_decay_style,
            warmup=train.lr_warmup_iters,
            decay=train.lr_decay_iters or optimizer_steps(stage, self._critic_only_steps),
        )
        self.actor.begin(train, schedule, build(made))
        if self.critic is not None:
            self.critic.begin(train, optimizer_steps(stage), made, run)
        self.frozen.begin(needs, train, self.policy, run)

    @property
    def _critic_only_steps(self) -> int:
        return self.train.num_critic_only_steps if self.critic is not None else 0

    def score(self, given: Batch | Portion, roles: frozenset[Role]) -> dict[str, Columns]:
        """Columns of a portion's rows, unchecked, on one of its ranks; or of a whole batch on all of them."""
        dealer = dealer_of(self, given)
        portion = given if isinstance(given, Portion) else dealer.portions(given)[self.seat.number]
        check_portion(self, portion, roles)
        with told_of_memory(self._passes(), portion, "scoring"):
            found: dict[str, Columns] = {role: self._score(portion, role) for role in sorted(roles)}
        found = {role: columns for role, columns in found.items() if columns} if speaks() else {}
        return found if isinstance(given, Portion) else dealer.gathered(given, found)

    def _score(self, portion: Portion, role: Role) -> Columns:
        if role in ("policy", "old_policy"):
            return self._log_probs(portion, self.policy, role)
        if role in ("float32", "bfloat16"):
            if role == self.train.dtype:
                return {"log_probs": self._log_probs(portion, self.policy, "policy")["log_probs"]}
            return log_probs_in(self, portion, getattr(torch, role))
        if role == "reference" and self.frozen.reference is not None:
            self.staging.before_change()
            self.actor.settle()
            with self.frozen.as_reference(self.policy):
                return {"log_probs": self._log_probs(portion, self.policy, role)["log_probs"]}
        if role == "teacher" and self.frozen.teacher is not None:
            return {"log_probs": self._log_probs(portion, self.frozen.teacher, role)["log_probs"]}
        if role == "values" and self.critic is not None:
            return {"values": self._columns(portion, self.critic.model, role, 1)[0]}
        raise checks.missing(role)

    def _log_probs(self, portion: Portion, model: Model, role: Role) -> Columns:
        log_probs, entropy = self._columns(portion, model, role, 2)
        return {"log_probs": log_probs, "entropy": entropy}

    def _columns(self, portion: Portion, model: Model, role: Role, count: int) -> NDArray[np.float32]:
        """What a model gives for each response token of the portion, [count, R], on the rank that speaks for it."""
        columns = torch.zeros(count, len(portion.batch.loss_mask), dtype=torch.float32, device=self.device)
        self.plugins.megatron.before_log_prob([model.passes.wrapped], role, self.ctx)
        micros = list(chain(*self.packs(portion)))
        found = model.passes.scores(micros)
        if speaks():
            for micro, rows in zip(micros, found, strict=True):
                columns[:, torch.from_numpy(micro.response).to(self.device)] = torch.stack(rows)
        return columns.cpu().numpy()

    def step(self, given: Batch | Portion) -> dict[str, float]:
        """Train on a portion; or on a whole batch, of which every rank takes its portion."""
        dealer = dealer_of(self, given)
        portion = given if isinstance(given, Portion) else dealer.step(given)[self.seat.number]
        check_portion(self, portion)
        with told_of_memory(self._passes(), portion, "training on"):
            return self._step(portion)

    def _step(self, portion: Portion) -> dict[str, float]:
        known, alone = dict[str, float](), self.steps < self._critic_only_steps
        if self.critic is not None:
            critic.check(portion.batch)
            known = portion.known
        outcomes = [self._optimizer_step(portion, micros, alone) for micros in self.packs(portion)]
        self.steps += 1
        return summary(outcomes, portion.trained) | known

    def _optimizer_step(self, portion: Portion, micros: list[MicroBatch], alone: bool) -> Outcome:
        """One optimizer step of the policy and of the critic, where there is one, or of the critic ``alone``.

        Both change or neither does, where a loss or gradient is not finite; a model without gradient stays as it is.
        """
        weight = self._sum(sum(float(m.weight.sum(dtype=np.float64)) for m in micros))
        if weight == 0:
            return Outcome("masked")
        metrics: dict[str, float] = {}
        bad: list[int] = []
        norm = 0.0
        if not alone:
            self._ready(self.actor)
            sums = Sums(portion, self.device)
            self.policy.passes.backward(micros, self.loss, self.train, sums)
            found, bad = totals(sums)
            norm = self.actor.norm()
            metrics = {n: v if n == "loss" else v / weight for n, v in found.items()} | {"grad_norm": norm}
        if self.critic is not None:
            self._ready(self.critic.learner)
            found, worse, theirs = self.critic.backward(micros, Sums(portion, self.device))
            metrics |= critic.figures(found, weight, theirs)
            bad = sorted({*bad, *worse})
        norms = norm, metrics.get("critic_grad_norm", 0.0)
        if bad or not all(map(math.isfinite, norms)):
            self.forget()
            loss = metrics.get("loss", 0.0) + metrics.get("value_loss", 0.0)
            return self.guard.skip(portion, bad, loss, math.hypot(*norms))
        self.guard.passed()
        return self._update(metrics, alone)

    def _ready(self, learner: Learner) -> None:
        learner.ready()
        self.plugins.megatron.before_train_step([learner.ddp], learner.optimizer, learner.steps, self.ctx)

    def _update(self, metrics: dict[str, float], alone: bool) -> Outcome:
        """Step what has a gradient; a gradient of exactly 0 moves nothing, not even by momentum or decay."""
        self.staging.before_change()
        if self.critic is not None:
            learner, norm = self.critic.learner, metrics["critic_grad_norm"]
            metrics["critic_lr"] = learner.update(norm) if norm else learner.rate
        if alone:
            self.forget()
            return Outcome("critic_only", metrics)
        norm = metrics["grad_norm"]
        metrics["lr"] = self.actor.update(norm) if norm else self.actor.rate
        self.forget()
        return Outcome("made" if norm else "no_gradient", metrics)

    def learners(self) -> list[Learner]:
        return [self.actor] if self.critic is None else [self.actor, self.critic.learner]

    def forget(self) -> None:
        """Drop all gradients."""
        if "gradients" not in self.parking.away:
            for learner in self.learners():
                learner.forget()

    def _sum(self, mine: float) -> float:
        """The sum of a number over data-parallel ranks; the others of each hold the same micro-batches."""
        total = torch.tensor(mine if speaks() else 0.0, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def packs(self, portion: Portion) -> list[list[MicroBatch]]:
        return pack(portion, max_tokens=self.train.max_tokens_per_gpu * self.seat.over)

    def _passes(self) -> Passes:
        assert self.stage is not None
        return Passes(
            stage=self.stage,
            where=f"rank {self.rank}, {self.device}",
            drop=self.forget if self.world > 1 else lambda: self.release(set()),
            pack=self.packs,
            share=self.settings.layout.cp,
            keys=smaller(self.settings),
        )

    def verify(self, batch: Batch) -> dict[str, float]:
        self.actor.settle()
        return verify(self, batch)

    @torch.no_grad()
    def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        if route is None:
            return WeightUpdate(version=version, epoch=0, transport="tensors", tensors=self.whole())
        self.actor.settle()
        return self.senders.publish(self.policy.tensors.sources(), version, route, rank=self.rank)

    @torch.no_grad()
    def whole(self) -> Tensors:
        """Every tensor by its name in the model folder, float32 or as it is kept, on rank 0; nothing on the others."""
        self.actor.settle()
        found: Tensors = {}
        for parts, tensor in stream(self.policy.tensors.sources()):
            if self.rank == 0:
                found |= {part.name: part.cut(tensor).cpu().contiguous() for part in parts}
        return found

    def save(self, path: Path) -> None:
        self._need_stage("save")
        saving.save(self, path)

    def restore(self, path: Path) -> None:
        self._need_stage("restore")
        with self.parking.present():
            restoring.restore(self, path)
        self.barrier()

    def fingerprint(self) -> str:
        self._need_stage("fingerprint")
        with self.parking.present():
            return fingerprint(self)

    def export(self, path: Path) -> None:
        with self.parking.present({"parameters"}):
            exporting.export(self, path)

    def _need_stage(self, call: str) -> None:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix=f"call begin(stage) before {call}")

    def release(self, what: set[str]) -> None:
        self.staging.before_change()
        self.forget()
        if "parameters" in what:
            self.senders.drop()
            for learner in self.learners() if "parameters" not in self.parking.away else ():
                learner.settle()
        if self.device.type != "cpu":
            self.parking.leave(what)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reacquire(self, what: set[str]) -> None:
        self.parking.back(what)

    def _tensors(self, what: str) -> Iterator[torch.Tensor]:
        """What a name of `release` stands for, on this rank's device."""
        learners = self.learners()
        if what == "parameters":
            found = [*(p for learner in learners for p in learner.stage.parameters()), *self.frozen.tensors()]
        elif what == "optimizer":
            found = [tensor for learner in learners for tensor in learner.states()]
        else:
            found = [tensor for learner in learners for tensor in learner.gradients()]
        return (tensor for tensor in found if tensor.device.type == self.device.type)

    @property
    def reference(self) -> Tensors | None:
        """This rank's shards of the reference, where the stage has one."""
        return self.frozen.reference

    def barrier(self) -> None:
        dist.barrier()


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"
