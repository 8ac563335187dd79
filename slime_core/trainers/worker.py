"""One rank of a trainer of any backend: its stage, and the calls that all ranks take part in.

A backend implements how its models begin, pass, learn and are stored. Partitioning, scoring, steps, skipping gradients
that are not finite, publishing and offloading are here, once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.presets import settle
from slime_core.errors import ConfigError, SlimeError, TrainerError
from slime_core.memory import first_line, gpu_memory, is_out_of_memory, limit_gpu, trim
from slime_core.planning.fsdp import micro_batch_tokens
from slime_core.planning.sizes import ModelConfig, ModelSizes
from slime_core.profile import StepProfile
from slime_core.trainers import exporting
from slime_core.trainers.base_checksums import BaseChecksums, Sums
from slime_core.trainers.batch import check_columns, check_tokens, stamp_of
from slime_core.trainers.data_parallel import CRITIC_COLUMNS, DataParallelRank, Partitioner, RankBatch, agreed, pack
from slime_core.trainers.expert_load import ExpertLoad
from slime_core.trainers.media import BatchMedia, check_media
from slime_core.trainers.offload import HostStaging, Offload
from slime_core.trainers.optimizer_step import (
    LossSums,
    NonFiniteGuard,
    Schedule,
    StepOutcome,
    optimizer_steps,
    summary,
)
from slime_core.trainers.process_group import join_group, least
from slime_core.trainers.publisher import Publisher
from slime_core.trainers.roles import critic_figures, missing
from slime_core.trainers.routing import RoutingReplay
from slime_core.trainers.verify import Slow, compared
from slime_core.types import Batch
from slime_core.weights.fp8 import rollout_form
from slime_core.weights.logprob_check import PRECISIONS
from slime_core.weights.transports.senders import Senders

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.lora.folder import Factors
    from slime_core.plugins import Plugins
    from slime_core.protocols import Loss, Role
    from slime_core.types import Columns, MicroBatch
    from slime_core.weights.folder import ModelFolder

Tensors = dict[str, torch.Tensor]


class Worker(Publisher):
    """A rank; methods run on the torch thread and take part in every collective.

    A backend makes ``dp_rank``, ``policy`` and ``actor`` (the policy's learner), and ``frozen`` in its ``__init__``. A
    learner has ``norm() -> float``, ``update(norm) -> rate``, ``rate`` and ``zero_grad()``; a critic ``path``,
    ``model`` and ``learner``; frozen models ``reference``, ``teacher``, ``check_teacher(batch)``; a model ``packs``.
    """

    dp_rank: DataParallelRank
    policy: Any
    actor: Any
    frozen: Any
    loss: Loss

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
        self.version = 0  # of the batch at hand
        self.train = config.train.model_copy(update={"dtype": self._dtype_of(config.train)})
        self.dtype: torch.dtype = getattr(torch, self.train.dtype)
        join_group(rank, world, device, rendezvous)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())  # of this rank
            torch.backends.cudnn.allow_tf32 = False  # or a tower's convolution in float32 loses half of its digits
        limit_gpu(self.device, config.cluster.gpu_memory_limit)
        self.critic: Any = None
        self.offload = Offload(self._tensors)
        self.staging = HostStaging(torch.device("cpu") if self.train.fsdp_cpu_offload else self.device)
        self.guard = NonFiniteGuard(errors=errors if rank == 0 else None)
        self.profile = StepProfile((errors or Path()).parent / "profile", config.report.profile if errors else 0)
        self.block_format = rollout_form(config.rollout.rollout_quantization, folder.stored_in)
        self.senders = Senders(self.device, folder.path, config, self.block_format)
        self.expert_load = ExpertLoad()  # of a dense model
        self.stage: Config | None = None
        self.steps = 0  # calls of step in this stage
        self.base = BaseChecksums(self._sums_of_base)
        self.segments = (errors or Path()).parent / "segments"
        self.media = BatchMedia.of(folder.config, self.segments)  # of a model that sees pictures
        self.routing: RoutingReplay | None = None  # of a stage that replays experts

    def _dtype_of(self, train: Any) -> str:
        return str(train.dtype if train.dtype != "auto" else "bfloat16" if self.device.type == "cuda" else "float32")

    def begin(self, stage: Config) -> None:
        train = settle(stage.train)
        if self._dtype_of(train) != self.train.dtype:
            raise TrainerError(
                "stages compute in different dtypes",
                where="train.dtype",
                fix="set train.dtype for the run, not in a [[stage]]",
            )
        self.train = train.model_copy(update={"dtype": self.train.dtype})
        self.stage = stage.model_copy(update={"train": self.train})
        self.staging.before_change()
        self.expert_load.check(train.moe_router_bias_update_rate)
        needs = self.plugins.needs(train)
        self.loss, self.steps = self.plugins.loss(train.loss_type), 0
        self.guard.most, self.guard.in_a_row = train.max_nonfinite_steps, 0
        self.routing = None if train.routing_replay == "off" or train.offline else self.make_routing()
        with self.offload.loaded():
            self.settle()
            self.prepare_stage()
            if "values" not in needs:
                self.critic = None
            elif self.critic is None or self.critic.path != train.critic_load:  # one of the stage before goes on
                self.critic = None  # its memory first
                self.critic = self.make_critic()
            schedule = Schedule(
                peak=train.lr,
                low=train.min_lr,
                style=train.lr_decay_style,
                warmup=train.lr_warmup_iters,
                decay=train.lr_decay_iters or optimizer_steps(stage, self._critic_only_steps),
            )
            self.begin_models(schedule, optimizer_steps(stage), needs)
            self.base.begin()
            if self.device.type == "cuda" and stage.report.save_interval:
                self.reserve()

    @property
    def _critic_only_steps(self) -> int:
        return int(self.train.num_critic_only_steps) if self.critic is not None else 0

    def partitioner(self) -> Partitioner:
        """Return the partitioner of the stage's batches.

        Raises:
            TrainerError: no stage has begun.
        """
        return Partitioner(self.begun_stage(), self.loss, self.dp_rank)

    def _routing_mismatch(self) -> dict[str, float]:
        """Share of replayed (token, layer) pairs whose own choice was another, in this step's passes; a collective."""
        if self.routing is None:
            return {}
        counts = torch.tensor(self.routing_differences(), dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(counts)
        differing, replayed = counts.tolist()
        return {"routing_mismatch": differing / max(replayed, 1)}

    def _check(
        self,
        rank_batch: RankBatch,
        whole: Batch | RankBatch,
        roles: frozenset[Role] = frozenset(),
        *,
        trains: bool = False,
    ) -> None:
        """Refuse tokens that a model has no row for; where that is so on one rank, on all of them.

        Args:
            whole: the batch that was partitioned here, the same on every rank

        Raises:
            TrainerError: TOK44 with the sample; others as `data_parallel.agreed`.
        """

        def check() -> None:
            check_tokens(rank_batch.batch, self.folder.vocab_size)
            check_media(rank_batch.batch, self.media)
            if "teacher" in roles and self.frozen.teacher is not None:
                self.frozen.check_teacher(rank_batch.batch)
            if self.routing is not None and (trains or rank_batch.batch.routed_experts is not None):
                self.routing.check(rank_batch)

        stamp = stamp_of(whole) if isinstance(whole, Batch) and self.world > 1 else rank_batch.stamp
        agreed(check, stamp, rank_batch.batch.version, self.rank, self.world)

    @torch.no_grad()
    def score(self, work: Batch | RankBatch, roles: frozenset[Role]) -> dict[str, Columns]:
        """Columns of a rank batch's rows, unchecked, on one of its ranks; or of a whole batch on all of them."""
        partitioner = self.partitioner()
        rank_batch = work if isinstance(work, RankBatch) else partitioner.partition(work)[self.dp_rank.number]
        self._check(rank_batch, work, roles)
        self.version = rank_batch.batch.version
        with (
            self._explain_oom(rank_batch, "scoring"),
            self._profile(rank_batch, "score" if roles else ""),
            self.adapter_of(rank_batch.batch),
        ):
            columns = {role: self._score(rank_batch, role) for role in sorted(roles)}
        columns_of: dict[str, Columns] = {role: one for role, one in columns.items() if one} if self.speaks() else {}
        return columns_of if isinstance(work, RankBatch) else partitioner.gather(work, columns_of)

    def _score(self, rank_batch: RankBatch, role: Role) -> Columns:
        if role in ("policy", "old_policy"):
            return dict(zip(("log_probs", "entropy"), self.columns(rank_batch, self.policy, role, 2)))
        if role in PRECISIONS:
            if role == self.train.dtype:
                return {"log_probs": self.columns(rank_batch, self.policy, "policy", 2)[0]}
            return self.log_probs_in(rank_batch, getattr(torch, role))
        if role == "reference" and self.frozen.reference is not None:
            self.staging.before_change()
            self.settle()
            with self.as_reference():
                return {"log_probs": self.columns(rank_batch, self.policy, role, 2)[0]}
        if role == "teacher" and self.frozen.teacher is not None:
            return {"log_probs": self.columns(rank_batch, self.frozen.teacher, role, 2)[0]}
        if role == "values" and self.critic is not None:
            return {"values": self.columns(rank_batch, self.critic.model, role, 1)[0]}
        raise missing(role)

    def step(self, work: Batch | RankBatch) -> dict[str, float]:
        """Train on a rank batch, or on this rank's part of a whole batch."""
        partitioner = self.partitioner()
        rank_batch = work if isinstance(work, RankBatch) else partitioner.partition_step(work)[self.dp_rank.number]
        self._check(rank_batch, work, trains=True)
        self.version, self.base.checked = rank_batch.batch.version, False
        with (
            self._explain_oom(rank_batch, "training on"),
            self._profile(rank_batch, "train"),
            self.adapter_of(rank_batch.batch),
        ):
            try:
                return self._step(rank_batch) | self._routing_mismatch()
            finally:
                if self.routing is not None:
                    self.routing.forget()
                if self.device.type == "cpu":
                    trim()  # activations, before an engine generates

    def _profile(self, rank_batch: RankBatch, part: str) -> AbstractContextManager[None]:
        """Record the block, where it is ``part`` of the step of `report.profile`; nothing where that is empty."""
        if not part:
            return nullcontext()
        return self.profile.record(rank_batch.batch.version + 1, f"{part}-rank{self.rank}")

    def _step(self, rank_batch: RankBatch) -> dict[str, float]:
        metrics, alone = dict[str, float](), self.steps < self._critic_only_steps
        micros = others = self.packs(rank_batch)
        if self.critic is not None:
            giver = "; an estimator that reads values gives returns"
            check_columns(rank_batch.batch, CRITIC_COLUMNS, "the critic learns from", giver)
            metrics = rank_batch.metrics
            if self.critic.model.packs != self.policy.packs:
                others = self.packs(rank_batch, self.critic.model)
        outcomes = [self._optimizer_step(rank_batch, *both, alone) for both in zip(micros, others, strict=True)]
        self.steps += 1
        return summary(outcomes, rank_batch.trained) | metrics

    def _optimizer_step(
        self, rank_batch: RankBatch, micros: list[MicroBatch], others: list[MicroBatch], alone: bool
    ) -> StepOutcome:
        """One optimizer step of the policy and of the critic, which gets ``others``, or of the critic ``alone``.

        Both change or neither does, where a loss or gradient is not finite; a model without gradient stays as it is.
        """
        weight = self._total(sum(float(m.weight.sum(dtype=np.float64)) for m in micros))
        if weight == 0:
            return StepOutcome("masked")
        metrics: dict[str, float] = {}
        bad: list[int] = []
        if not alone:
            sums = LossSums(rank_batch, self.device)
            self.expert_load.reset()
            self.run_backward(micros, sums)
            norm = self.actor.norm()  # first: what waits for the device finds the sums there
            totals, bad = self.finish(sums)
            metrics = {n: v if n == "loss" else v / weight for n, v in totals.items()} | {"grad_norm": norm}
            metrics |= self.expert_load.gather(self.world)
        if self.critic is not None:
            sums = LossSums(rank_batch, self.device)
            self.critic_backward(others, sums)
            norm = self.critic.learner.norm()
            totals, worse = self.finish(sums)
            metrics |= critic_figures(totals, weight, norm)
            bad = sorted({*bad, *worse})
        norms = metrics.get("grad_norm", 0.0), metrics.get("critic_grad_norm", 0.0)
        if bad or not all(map(math.isfinite, norms)):
            self.zero_grad()
            loss = metrics.get("loss", 0.0) + metrics.get("value_loss", 0.0)
            return self.guard.skip(rank_batch, bad, loss, math.hypot(*norms))
        self.guard.in_a_row = 0
        return self._update(metrics, alone)

    def _update(self, metrics: dict[str, float], alone: bool) -> StepOutcome:
        """Step what has a gradient; a gradient of exactly 0 moves nothing, not even by momentum or decay."""
        self.staging.before_change()
        if self.critic is not None:
            learner, norm = self.critic.learner, metrics["critic_grad_norm"]
            metrics["critic_lr"] = learner.update(norm) if norm else learner.rate
        if alone:
            self.zero_grad()
            return StepOutcome("critic_only", metrics)
        norm = metrics["grad_norm"]
        metrics["lr"] = self.actor.update(norm) if norm else self.actor.rate
        if norm:
            self.expert_load.update_biases(self.train.moe_router_bias_update_rate)
        self.zero_grad()
        return StepOutcome("made" if norm else "no_gradient", metrics)

    @property
    def actors(self) -> dict[str, Any]:
        """The policy's learners: by adapter, or of the whole model by an empty name."""
        return {"": self.actor}

    def adapter_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Passes and steps inside the block are those of the batch's adapter, of several."""
        return nullcontext()

    def learners(self) -> list[Any]:
        return [*self.actors.values(), *([] if self.critic is None else [self.critic.learner])]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if "gradients" not in self.offload.on_host:
            for learner in self.learners():
                learner.zero_grad()

    def _total(self, value: float) -> float:
        """The sum of a number over data-parallel ranks; the others of each hold the same micro-batches."""
        if self.world == 1:
            return value
        total = torch.tensor(value if self.speaks() else 0.0, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def packs(self, rank_batch: RankBatch, model: Any = None) -> list[list[MicroBatch]]:
        """The rank batch's micro-batches by optimizer step, for the policy or another model."""
        most = self.dp_rank.most_tokens(self.train)
        return pack(rank_batch, max_tokens=most, alone=not (model or self.policy).packs, media=self.media)

    @contextmanager
    def _explain_oom(self, rank_batch: RankBatch, what: str) -> Iterator[None]:
        """Turn an allocation that fails inside the block, a plugin's too, into TRN96; gradients are dropped.

        Raises:
            TrainerError: TRN96 with the tokens of the rank batch, the largest micro-batch, and the keys to lower.
        """
        try:
            yield
        except SlimeError as error:  # of a plugin's loss or hook, say: its words name the plugin
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            message = error.what.splitlines()[0]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        else:
            return
        if self.world > 1:  # a collective may wait for ranks that wait for this one, whose error would never be told
            self.zero_grad()  # outside of the handler: the trace that holds the pass's tensors is gone
        else:
            self.release(set())
        raise self._oom_error(rank_batch, what, message)

    def _oom_error(self, rank_batch: RankBatch, what: str, message: str) -> TrainerError:
        train, batch = self.train, rank_batch.batch
        longest = int(batch.lengths.max())
        try:
            sizes = [len(micro.tokens) for step in self.packs(rank_batch) for micro in step]
        except MemoryError:  # not even for this
            sizes = [min(max(longest, self.dp_rank.most_tokens(train)), len(batch.tokens))]
        tokens = max(sizes)
        fixes = []
        if tokens > longest:
            lower = -(-max(longest, tokens // 2) // self.dp_rank.context_parallel)
            most = self.dp_rank.most_tokens(train) // self.dp_rank.context_parallel
            fixes.append(f"train.max_tokens_per_gpu={lower}   (it is {most})")
        else:
            fixes.append(
                "the longest sample alone is that large: lower rollout.rollout_max_response_len for a new run"
            )
        chunk = train.logprob_chunk_tokens
        fixes.append(
            f"train.logprob_chunk_tokens={max(1, chunk // 2) if chunk else 256}   (it is {chunk or 'automatic'})"
        )
        fixes += self.smaller()
        return TrainerError(
            f"memory ran out while {what} step {batch.version}: {len(batch.tokens)} tokens of {len(batch)} samples in "
            f"{len(sizes)} micro-batches, the largest of {tokens} tokens",
            code="TRN96",
            where=f"step {batch.version}, rank {self.rank}, {self.device}",
            why=f"{message}; no weight was changed by this optimizer step, and the batch stays in the ledger, not "
            "trained",
            fix="resume with smaller passes: slime run --resume RUN_DIR, with one or more of\n" + "\n".join(fixes),
        )

    def verify(self, batch: Batch) -> dict[str, float]:
        """Errors of one step's loss and gradients; a collective, the same answer on every rank. No critic's."""
        partitioner = self.partitioner()
        batch = partitioner.prepare(batch)
        rank_batch = partitioner.partition(batch)[self.dp_rank.number]
        self._check(rank_batch, batch)
        self.settle()
        with self._own_routing(), self.adapter_of(rank_batch.batch):
            return compared(batch, self.packs(rank_batch), partial(self.gradients, rank_batch), self.slow_way())

    @contextmanager
    def _own_routing(self) -> Iterator[None]:
        """Routers choose themselves inside the block, as transformers' model does."""
        routing, self.routing = self.routing, None
        try:
            yield
        finally:
            self.routing = routing

    def slow_way(self) -> Slow:
        """transformers' model with the weights that the ranks hold now; a collective."""
        stage, media = self.begun_stage(), self.media
        return Slow(self.slow_model(), stage, self.loss, self.dtype, self.rank, self.world, media=media)

    def _sums_of_base(self) -> Sums:
        with self.offload.loaded({"parameters"}):
            return self.base_sums()

    def restore(self, path: Path) -> None:
        self.begun_stage()
        with self.offload.loaded():
            self.read(path)
        self.barrier()

    def fingerprint(self) -> str:
        with self.offload.loaded():
            if self.device.type == "cuda":  # where it takes milliseconds
                self.base.check(f"after step {self.version + 1}")
            return self.checksum()

    def export(self, path: Path) -> None:
        exporting.export(self, path)
        self.barrier()

    def default_tokens(self, *, fused: bool, ranks: int = 1) -> int:
        """Tokens of a micro-batch, by the memory of a device of this kind and not by what is free: a resume's too.

        A collective; arguments as in `micro_batch_tokens`.
        """
        memory = gpu_memory(self.device) if self.device.type == "cuda" else 0
        sizes = ModelSizes(ModelConfig.of(self.folder.config), ())
        return least(micro_batch_tokens(sizes, memory, fused=fused, ranks=ranks))

    def begun_stage(self) -> Config:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) first")
        return self.stage

    def release(self, what: set[str]) -> None:
        self.staging.before_change()
        self.zero_grad()
        if "parameters" in what:
            self.senders.drop()
            if "parameters" not in self.offload.on_host:
                self.settle()
        if self.device.type != "cpu":
            self.offload.to_host(what)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reacquire(self, what: set[str]) -> None:
        self.offload.to_device(what)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def settle(self) -> None:
        """Have whole parameters where a backend gathers them later than it steps; a collective."""

    def speaks(self) -> bool:
        """Whether this rank counts for its data-parallel rank."""
        return True

    def make_routing(self) -> RoutingReplay:
        """What the stage's passes replay, for this backend's routers."""
        raise ConfigError(
            f"train_backend = {self.train.train_backend} replays no experts",
            code="CFG04",
            where="train.routing_replay",
            fix="--routing-replay off",
        )

    def routing_differences(self) -> tuple[int, int]:
        """See `Routers.differences`, of this rank's routers since the last call."""
        return 0, 0

    @abstractmethod
    def prepare_stage(self) -> None:
        """Follow ``self.train`` and ``self.stage``, before models begin."""

    @abstractmethod
    def make_critic(self) -> Any:
        """A critic of ``train.critic_load``."""

    @abstractmethod
    def begin_models(self, schedule: Schedule, steps: int, needs: frozenset[Role]) -> None:
        """Fresh optimizers of policy and critic, the stage's ``steps``, and the frozen models that it needs."""

    @abstractmethod
    def columns(self, rank_batch: RankBatch, model: Any, role: Role, count: int) -> NDArray[np.float32]:
        """What a model gives for each response token, [count, R]: its log-prob and entropy, or its value."""

    @abstractmethod
    def log_probs_in(self, rank_batch: RankBatch, dtype: torch.dtype) -> Columns:
        """The policy's log-probs computed in another dtype; nothing of a model that is too large; a collective."""

    @abstractmethod
    def as_reference(self) -> AbstractContextManager[None]:
        """The policy computes with the reference's weights inside the block."""

    @abstractmethod
    def run_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        """The policy's gradients of one optimizer step, and its sums."""

    @abstractmethod
    def critic_backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        """The critic's gradients of one optimizer step, and its sums."""

    @abstractmethod
    def finish(self, sums: LossSums) -> tuple[dict[str, float], list[int]]:
        """A step's totals over all ranks, and the samples of any rank whose loss is not finite."""

    @abstractmethod
    def gradients(self, rank_batch: RankBatch, micros: list[MicroBatch]) -> tuple[float, Tensors]:
        """An optimizer step's loss, and every whole gradient in float64 on the host; nothing is stepped."""

    @abstractmethod
    def slow_model(self) -> Any:
        """transformers' model with the weights that the ranks hold together; a collective."""

    @abstractmethod
    def smaller(self) -> Sequence[str]:
        """Lines of settings that make passes smaller, beside those of [train]."""

    @abstractmethod
    def reserve(self) -> None:
        """Make the host memory of a save before it is due."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Copy the state and let it be written into ``path``; a collective."""

    @abstractmethod
    def read(self, path: Path) -> None:
        """Take the state that was saved; all of it is read before anything changes; a collective."""

    @abstractmethod
    def checksum(self) -> str:
        """The checksum of `trainers.fingerprint` over the policy's parameters and the critic's; a collective."""

    @abstractmethod
    def write_folder(self, path: Path) -> None:
        """Write a model folder; a collective."""

    def base_sums(self) -> Sums:
        """Checksums of the tensors that adapters leave as they are; empty where all learn; a collective."""
        return {}

    def whole_adapters(self) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Factors]]]:
        """By adapter its adapter_config.json, and on rank 0 its factors by weight of the base; a collective."""
        raise exporting.no_adapter_folders(self.train.train_backend)

    @abstractmethod
    def _tensors(self, what: str) -> Iterable[torch.Tensor]:
        """What a name of `release` stands for, on this rank's device."""
