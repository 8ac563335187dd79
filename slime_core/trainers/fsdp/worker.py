"""One rank's models, optimizers and stage; methods run on the torch thread and take part in every collective."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.algorithms import settle
from slime_core.errors import TrainerError
from slime_core.memory import trim
from slime_core.trainers import checks, critic
from slime_core.trainers.dealing import check_portion, dealer_of
from slime_core.trainers.fsdp import files, saving
from slime_core.trainers.fsdp.critic import Critic
from slime_core.trainers.fsdp.fingerprint import fingerprint
from slime_core.trainers.fsdp.passes import forward
from slime_core.trainers.fsdp.policy import Policy
from slime_core.trainers.fsdp.precision import in_dtype
from slime_core.trainers.fsdp.publishing import Publisher
from slime_core.trainers.fsdp.rank import DTYPES, Rank, Tensors, dtype_name
from slime_core.trainers.fsdp.sharding import reshard
from slime_core.trainers.fsdp.verify import verify
from slime_core.trainers.portion import Portion
from slime_core.trainers.schedule import Schedule, optimizer_steps
from slime_core.trainers.share import Outcome, Sums, summary
from slime_core.trainers.short import Passes, told_of_memory
from slime_core.types import Batch

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Role
    from slime_core.transfer import WeightRoute
    from slime_core.types import Columns, MicroBatch, WeightUpdate


class Worker(Rank):
    """See `FsdpTrainer`, whose calls these are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.publisher = Publisher(self)

    def begin(self, stage: Config) -> None:
        train = settle(stage.train)
        stage = stage.model_copy(update={"train": train})
        if DTYPES[dtype_name(stage, self.device)] != self.dtype:
            raise TrainerError(
                "stages compute in different dtypes",
                where="train.dtype",
                fix="set train.dtype for the run, not in a [[stage]]",
            )
        self.staging.before_change()
        needs = self.plugins.needs(train)
        self.stage, self.loss, self.steps = stage, self.plugins.loss(train.loss_type), 0
        self.guard.most, self.guard.in_a_row = train.max_nonfinite_steps, 0
        self.policy.chunk = train.logprob_chunk_tokens
        self.policy.choose_recomputing(train)
        with self.parking.present():
            self._begin_models(stage, needs)

    def _begin_models(self, stage: Config, needs: frozenset[Role]) -> None:
        train = stage.train
        self._begin_critic(train, needs)
        schedule = Schedule(
            peak=train.lr,
            low=train.min_lr,
            style=train.lr_decay_style,
            warmup=train.lr_warmup_iters,
            decay=train.lr_decay_iters or optimizer_steps(stage, self._critic_only_steps),
        )
        self.actor.begin(train, schedule)
        if self.critic is not None:
            self.critic.begin(train, optimizer_steps(stage))
        self.frozen.begin(needs, train, self.actor)
        if self.device.type == "cuda" and stage.report.save_interval:
            saving.reserve(self)

    def _begin_critic(self, train: Any, needs: frozenset[Role]) -> None:
        """A critic goes on from the stage before it, where that had the same one."""
        if "values" not in needs:
            self.critic = None
        elif self.critic is None or self.critic.path != train.critic_load:
            self.critic = Critic(
                train, self.actor, self.folder, self.mesh, seed=self.seed, dtype=self.dtype, device=self.device
            )

    @property
    def _critic_only_steps(self) -> int:
        assert self.stage is not None
        return self.stage.train.num_critic_only_steps if self.critic is not None else 0

    @torch.no_grad()
    def score(self, given: Batch | Portion, roles: frozenset[Role]) -> dict[str, Columns]:
        """Columns of a portion's rows, unchecked; or of a whole batch, of which every rank takes its portion."""
        dealer = dealer_of(self, given)
        portion = given if isinstance(given, Portion) else dealer.portions(given)[self.rank]
        check_portion(self, portion, roles)
        with told_of_memory(self._passes(), portion, "scoring"):
            found = self._score_roles(portion, roles)
        return found if isinstance(given, Portion) else dealer.gathered(given, found)

    def _score_roles(self, portion: Portion, roles: frozenset[Role]) -> dict[str, Columns]:
        found: dict[str, Columns] = {}
        for role in sorted(roles):
            if role in ("policy", "old_policy"):
                found[role] = self._score(portion, self.policy)
            elif role in DTYPES:
                model = self.policy if DTYPES[role] == self.dtype else in_dtype(self.policy, DTYPES[role])
                found[role] = {"log_probs": self._score(portion, model)["log_probs"]}
            elif role == "reference" and self.frozen.reference is not None:
                self.staging.before_change()
                with self.frozen.as_reference(self.actor):
                    found[role] = {"log_probs": self._score(portion, self.policy)["log_probs"]}
            elif role == "teacher" and self.frozen.teacher is not None:
                found[role] = {"log_probs": self._score(portion, self.frozen.teacher)["log_probs"]}
            elif role == "values" and self.critic is not None:
                found[role] = {"values": self.critic.score(portion, self.packs(portion, self.critic.model))}
            else:
                raise checks.missing(role)
        return found

    def _score(self, portion: Portion, model: Policy) -> Columns:
        columns = torch.zeros(2, len(portion.batch.loss_mask), dtype=torch.float32, device=self.device)
        for micro in chain(*self.packs(portion, model)):
            log_probs, entropy = forward(model, micro, self.temperature(micro), self.device)
            where = torch.from_numpy(micro.response).to(self.device)
            columns[0, where], columns[1, where] = log_probs.float(), entropy.float()
        reshard(model)
        log_probs, entropy = columns.cpu().numpy()
        return {"log_probs": log_probs, "entropy": entropy}

    def step(self, given: Batch | Portion) -> dict[str, float]:
        """Train on a portion; or on a whole batch, of which every rank takes its portion."""
        dealer = dealer_of(self, given)
        portion = given if isinstance(given, Portion) else dealer.step(given)[self.rank]
        check_portion(self, portion)
        with told_of_memory(self._passes(), portion, "training on"):
            try:
                return self._step(portion)
            finally:
                if self.device.type == "cpu":
                    trim()  # activations, before an engine generates

    def _step(self, portion: Portion) -> dict[str, float]:
        alone = self.steps < self._critic_only_steps
        micros = self.packs(portion)
        if self.critic is None:
            outcomes = [self._optimizer_step(portion, mine) for mine in micros]
            known = {}
        else:
            critic.check(portion.batch)
            known = portion.known
            same = self.critic.model.packs == self.policy.packs
            others = micros if same else self.packs(portion, self.critic.model)
            outcomes = [self._optimizer_step(portion, *both, alone) for both in zip(micros, others, strict=True)]
        self.steps += 1
        return summary(outcomes, portion.trained) | known

    def _optimizer_step(
        self, portion: Portion, micros: list[MicroBatch], critics: list[MicroBatch] | None = None, alone: bool = False
    ) -> Outcome:
        """One optimizer step of the policy, of the critic where its packs are given, or of the critic ``alone``.

        Both change or neither does, where a loss or gradient is not finite; a model without gradient stays as it is.
        """
        sums = Sums(portion, self.device)
        weight = sums.reduce_scalar(sum(float(m.weight.sum(dtype=np.float64)) for m in micros), self.world)
        if weight == 0:
            return Outcome("masked")
        metrics: dict[str, float] = {}
        grads: Tensors = {}
        theirs: Tensors = {}
        bad: list[int] = []
        norm = 0.0
        if not alone:
            self.run_backward(micros, sums)
            totals, bad = sums.finish(self.world)
            grads, norm = self.actor.gradients()
            metrics = {n: v if n == "loss" else v / weight for n, v in totals.items()} | {"grad_norm": norm}
        if self.critic is not None and critics is not None:
            sums = Sums(portion, self.device)
            self.critic.backward(critics, sums)
            totals, worse = sums.finish(self.world)
            theirs, norm_of_critic = self.critic.learner.gradients()
            metrics |= critic.figures(totals, weight, norm_of_critic)
            bad = sorted({*bad, *worse})
        norms = norm, metrics.get("critic_grad_norm", 0.0)
        if bad or not all(map(math.isfinite, norms)):
            self.forget()
            loss = metrics.get("loss", 0.0) + metrics.get("value_loss", 0.0)
            return self.guard.skip(portion, bad, loss, math.hypot(*norms))
        self.guard.passed()
        return self._update(grads, theirs, metrics, alone)

    def _update(self, grads: Tensors, theirs: Tensors, metrics: dict[str, float], alone: bool) -> Outcome:
        """Step what has a gradient; a gradient of exactly 0 moves nothing, not even by momentum or decay."""
        self.staging.before_change()
        if self.critic is not None and "critic_grad_norm" in metrics:
            learner, norm = self.critic.learner, metrics["critic_grad_norm"]
            metrics["critic_lr"] = learner.update(theirs, norm) if norm else learner.rate
        if alone:
            return Outcome("critic_only", metrics)
        norm = metrics["grad_norm"]
        metrics["lr"] = self.actor.update(grads, norm) if norm else self.actor.rate
        self.forget()
        return Outcome("made" if norm else "no_gradient", metrics)

    def _passes(self) -> Passes:
        assert self.stage is not None
        return Passes(
            stage=self.stage,
            where=f"rank {self.rank}, {self.device}",
            drop=self.forget if self.world > 1 else lambda: self.release(set()),
            pack=self.packs,
            keys=_recompute_more(self.stage.train),
        )

    def verify(self, batch: Batch) -> dict[str, float]:
        return verify(self, batch)

    def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        return self.publisher.publish(version, route)

    def save(self, path: Path) -> None:
        saving.save(self, path)

    def fingerprint(self) -> str:
        known = dict(self.parameters())
        if self.critic is not None:
            known |= {f"critic.{name}": tensor for name, tensor in self.critic.learner.parameters().items()}
        with self.parking.present():
            return fingerprint(known, self.world)

    def restore(self, path: Path) -> None:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) before restore(path)")
        with self.parking.present():
            saving.restore(self, path)
        self._barrier()

    def export(self, path: Path) -> None:
        with self.parking.present({"parameters"}):
            whole = self.whole()
        if self.rank == 0:
            files.write_folder(path, self.policy.hf, whole, self.folder.tokenizer())
        self._barrier()

    def release(self, what: set[str]) -> None:
        self.staging.before_change()
        self.forget()
        if "parameters" in what:
            self.publisher.drop()
        if self.device.type != "cpu":
            self.parking.leave(what)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reacquire(self, what: set[str]) -> None:
        self.parking.back(what)

    def _barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def _recompute_more(train: Any) -> tuple[str, ...]:
    """What to set where memory runs out."""
    if not train.gradient_checkpointing:
        return ("train.gradient_checkpointing=true",)
    some = train.gradient_checkpointing_layers
    return (f"train.gradient_checkpointing_layers=0   (it is {some}; 0 is all)",) if some else ()
