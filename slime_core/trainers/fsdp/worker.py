"""One rank's model, optimizer and stage; every method runs on the torch thread and takes part in every collective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.algorithms import settle
from slime_core.errors import TrainerError
from slime_core.trainers.fsdp import files
from slime_core.trainers.fsdp.optimizer import AdamW, clip, global_norm
from slime_core.trainers.fsdp.passes import Sums, backward, forward
from slime_core.trainers.fsdp.policy import Policy
from slime_core.trainers.fsdp.schedule import Schedule
from slime_core.trainers.fsdp.sharding import full, join, local, own_part, reshard, shard
from slime_core.trainers.pack import pack
from slime_core.types import WeightUpdate

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Loss, Role
    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.folder import ModelFolder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHOWN = 8  # sample ids in a message
Tensors = dict[str, torch.Tensor]


class Worker:
    """See `FsdpTrainer`, whose calls these are."""

    def __init__(
        self,
        config: Config,
        plugins: Plugins,
        folder: ModelFolder,
        rank: int,
        world: int,
        device: str,
        rendezvous: str | Path | None,
    ) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.plugins, self.folder, self.seed = plugins, folder, config.seed
        self.dtype = DTYPES[_dtype_name(config, self.device)]
        mesh = join(rank, world, device, rendezvous)
        self.policy = Policy(self._build(folder), chunk=config.train.logprob_chunk_tokens)
        self.policy.try_model()
        shard(self.policy, mesh, self.dtype)
        self.stage: Config | None = None
        self.loss: Loss
        self.schedule: Schedule
        self.optimizer: AdamW
        self.reference: Tensors | None = None

    def _build(self, folder: ModelFolder) -> Any:
        return folder.build_model("float32", self.seed).to(self.device).eval().requires_grad_(True)

    def parameters(self) -> Tensors:
        """Parameters by their names in the folder, tied ones once; DTensors."""
        return dict(self.policy.hf.named_parameters())

    def locals(self) -> Tensors:
        """This rank's shards of the parameters."""
        return {name: local(p.detach()) for name, p in self.parameters().items()}

    def begin(self, stage: Config) -> None:
        train = settle(stage.train)
        stage = stage.model_copy(update={"train": train})
        if DTYPES[_dtype_name(stage, self.device)] != self.dtype:
            raise TrainerError(
                "stages compute in different dtypes",
                where="train.dtype",
                fix="set train.dtype for the run, not in a [[stage]]",
            )
        self.stage, self.loss = stage, self.plugins.loss(train.loss_type)
        self.policy.chunk, self.policy.recompute = train.logprob_chunk_tokens, train.gradient_checkpointing
        self.optimizer = AdamW(train.adam_beta1, train.adam_beta2, train.adam_eps, train.weight_decay)
        self.schedule = Schedule(
            peak=train.lr,
            low=train.min_lr,
            style=train.lr_decay_style,
            warmup=train.lr_warmup_iters,
            decay=train.lr_decay_iters or optimizer_steps(stage),
        )
        self.reference = self._reference(train) if train.kl_loss_coef > 0 else None

    def _reference(self, train: Any) -> Tensors:
        if not train.ref_load:
            return {name: tensor.clone() for name, tensor in self.locals().items()}
        folder = type(self.folder).open(train.ref_load)
        mine = self.parameters()
        theirs = dict(self._build(folder).named_parameters())
        wrong = [n for n in {*mine, *theirs} if n not in mine or n not in theirs or mine[n].shape != theirs[n].shape]
        if wrong:
            raise TrainerError(
                f"the reference model differs from the policy in {len(wrong)} tensors: {sorted(wrong)[:5]}",
                code="TRN104",
                where=f"train.ref_load = {train.ref_load}",
                fix="name a model of the same architecture and vocabulary",
            )
        return {name: own_part(tensor.detach(), mine[name]).clone() for name, tensor in theirs.items()}

    @torch.no_grad()
    def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        self._check(batch)
        found: dict[str, Columns] = {}
        for role in sorted(roles):
            if role in ("policy", "old_policy"):
                found[role] = self._score(batch)
            elif role == "reference" and self.reference is not None:
                with self._weights(self.reference):
                    found[role] = {"log_probs": self._score(batch)["log_probs"]}
            else:
                raise TrainerError(
                    f"this trainer holds no {role} model",
                    why="a reference is kept where train.kl_loss_coef > 0" if role == "reference" else "",
                )
        return found

    def _score(self, batch: Batch) -> Columns:
        columns = torch.zeros(2, len(batch.loss_mask), dtype=torch.float32, device=self.device)
        for micro in self._pack(batch, whole=True)[0]:
            log_probs, entropy = forward(self.policy, micro, self._temperature(micro), self.device)
            where = torch.from_numpy(micro.response).to(self.device)
            columns[0, where], columns[1, where] = log_probs.float(), entropy.float()
        reshard(self.policy)
        if self.world > 1:
            dist.all_reduce(columns)
        log_probs, entropy = columns.cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(log_probs))
        if bad.size:
            sample = int(np.searchsorted(batch.response_offsets, bad[0], side="right")) - 1
            raise TrainerError(
                f"a log-prob of sample {batch.sample_ids[sample]} is {log_probs[bad[0]]}", code="TRN95",
                where=f"sample {batch.sample_ids[sample]}", why="the weights or a logit are not finite",
            )  # fmt: skip
        return {"log_probs": log_probs, "entropy": entropy}

    @contextmanager
    def _weights(self, other: Tensors) -> Iterator[None]:
        """Compute with other weights inside the block."""
        mine = self.locals()
        kept = {name: tensor.clone() for name, tensor in mine.items()}
        try:
            for name, tensor in mine.items():
                tensor.copy_(other[name])
            yield
        finally:
            for name, tensor in mine.items():
                tensor.copy_(kept[name])

    def step(self, batch: Batch) -> dict[str, float]:
        self._check(batch)
        missing = [name for name in self.loss.columns if name not in batch.columns]
        if missing:
            raise TrainerError(
                f"the batch has no column {missing[0]}, which the loss '{self.loss.name}' reads",
                why=f"it has {sorted(batch.columns)}",
            )
        done = [self._optimizer_step(batch, micros) for micros in self._pack(batch)]
        trained = [metrics for metrics in done if metrics]
        names = trained[0].keys() if trained else ()
        means = {name: sum(m[name] for m in trained) / len(trained) for name in names}
        return {
            "loss": 0.0,
            **means,
            "lr": trained[-1]["lr"] if trained else 0.0,
            "train_tokens": float(batch.loss_mask.sum()),
            "optimizer_steps": float(len(trained)),
            "skipped_steps": float(len(done) - len(trained)),
        }

    def _optimizer_step(self, batch: Batch, micros: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step; an empty answer where every token is masked, and nothing changes."""
        sums = Sums(batch.response_offsets, self.device)
        weight = sums.reduce_scalar(sum(float(m.weight.sum(dtype=np.float64)) for m in micros), self.world)
        if weight == 0:
            return {}
        assert self.stage is not None
        for number, micro in enumerate(micros):
            self._reduce_gradients(number + 1 == len(micros) or self.world > 1)
            backward(self.policy, self.loss, self.stage.train, micro, self._temperature(micro), sums)
        metrics, bad = sums.finish(self.world)
        grads = {n: local(p.grad) for n, p in self.parameters().items() if p.grad is not None}
        norm = global_norm(grads, self.world)
        if bad or not math.isfinite(norm):
            self.policy.zero_grad()
            raise _not_finite(batch, bad, metrics["loss"], norm)
        clip(grads, norm, self.stage.train.clip_grad)
        lr = self.schedule.at(self.optimizer.steps)
        self.optimizer.step(self.locals(), grads, lr)
        self.policy.zero_grad()
        loss = metrics.pop("loss")
        return {"loss": loss, **{n: v / weight for n, v in metrics.items()}, "grad_norm": norm, "lr": lr}

    def _reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass hands gradients to the shards; one rank adds them up where they are first."""
        policy: Any = self.policy
        policy.set_requires_gradient_sync(now)
        policy.set_reshard_after_backward(now)

    def _pack(self, batch: Batch, whole: bool = False) -> list[list[MicroBatch]]:
        assert self.stage is not None
        train = self.stage.train
        return pack(
            batch,
            max_tokens=train.max_tokens_per_gpu,
            num_steps=1 if whole else train.num_steps_per_rollout,
            global_batch_size=0 if whole else train.global_batch_size,
            aggregation=train.loss_aggregation,
            divisor=train.loss_divisor or self.stage.rollout.rollout_max_response_len,
            alone=not self.policy.packs,
            rank=self.rank,
            world=self.world,
        )

    def _temperature(self, micro: MicroBatch) -> torch.Tensor | None:
        """Of each response token's draw; None where all are 1."""
        if micro.temperature is None or (micro.temperature == 1).all():
            return None
        return torch.from_numpy(micro.temperature).to(self.device)

    def _check(self, batch: Batch) -> None:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) first")
        if len(batch) == 0:
            raise TrainerError("the batch is empty", where=f"step {batch.version}")
        high = int(batch.tokens.max())
        if high >= self.folder.vocab_size:
            place = int(batch.tokens.argmax())
            sample = batch.sample_ids[int(np.searchsorted(batch.offsets, place, side="right")) - 1]
            raise TrainerError(
                f"sample {sample} holds token id {high}, outside the vocabulary of {self.folder.vocab_size}",
                code="TOK44",
                where=f"sample {sample}",
            )
        for name, values in batch.columns.items():
            if values.shape[:1] != batch.loss_mask.shape:
                raise TrainerError(
                    f"column {name} has shape {values.shape}, the batch {batch.loss_mask.shape} response tokens",
                    code="TRN102",
                )

    def publish(self, version: int) -> WeightUpdate:
        if self.world == 1:
            shared = "shared" if self.dtype == torch.float32 else "tensors"
            tensors = {name: local(tensor.detach()) for name, tensor in self.policy.hf.state_dict().items()}
            return WeightUpdate(version=version, epoch=0, transport=shared, tensors=tensors)
        return WeightUpdate(version=version, epoch=0, transport="tensors", tensors=self._whole())

    def _whole(self) -> Tensors:
        """Every tensor of the model's state on rank 0, tied names as one tensor; nothing on the others."""
        owners = {name: id(p) for name, p in self.policy.hf.named_parameters(remove_duplicate=False)}
        gathered: dict[Any, torch.Tensor] = {}
        whole: Tensors = {}
        for name, tensor in self.policy.hf.state_dict().items():
            owner = owners.get(name, name)
            if owner not in gathered:
                one = full(tensor.detach())
                gathered[owner] = one.cpu().contiguous() if self.rank == 0 else torch.empty(0)
            whole[name] = gathered[owner]
        return whole if self.rank == 0 else {}

    def save(self, path: Path) -> None:
        mine = self.parameters()
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
        files.write_shards(path / files.PARAMETERS, self.locals(), mine.__getitem__, self.rank)
        optimizer = self.optimizer
        moments = {f"moment1.{n}": t for n, t in optimizer.moment1.items()}
        moments |= {f"moment2.{n}": t for n, t in optimizer.moment2.items()}
        files.write_shards(path / files.MOMENTS, moments, lambda n: mine[n.partition(".")[2]], self.rank)
        if self.reference is not None:
            files.write_shards(path / files.REFERENCE, self.reference, mine.__getitem__, self.rank)
        if self.rank == 0:
            state = {"optimizer_steps": optimizer.steps, "reference": self.reference is not None}
            files.write_state(path / files.STATE, state)
        self._barrier()

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        if self.stage is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) before restore(path)")
        state, mine = files.read_state(path / files.STATE), self.parameters()
        moments = files.read_shards(path / files.MOMENTS, lambda n: mine[n.partition(".")[2]])
        stored = files.read_shards(path / files.PARAMETERS, mine.__getitem__)
        if missing := sorted(set(mine) - set(stored)):
            raise TrainerError(f"the checkpoint lacks {len(missing)} parameters: {missing[:5]}", where=str(path))
        for name, tensor in self.locals().items():
            tensor.copy_(stored[name])
        self.optimizer.steps = int(state["optimizer_steps"])
        self.optimizer.moment1 = {n[8:]: t for n, t in moments.items() if n.startswith("moment1.")}
        self.optimizer.moment2 = {n[8:]: t for n, t in moments.items() if n.startswith("moment2.")}
        if state["reference"]:
            self.reference = files.read_shards(path / files.REFERENCE, mine.__getitem__)
        self._barrier()

    def export(self, path: Path) -> None:
        whole = self._whole()
        if self.rank == 0:
            files.write_folder(path, self.policy.hf, whole, self.folder.tokenizer())
        self._barrier()

    def release(self, what: set[str]) -> None:
        self.policy.zero_grad()
        if self.device.type != "cpu" and "optimizer" in what:
            self.optimizer.to("cpu")
        if self.device.type != "cpu" and "parameters" in what:
            self.policy.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reacquire(self, what: set[str]) -> None:
        if self.device.type != "cpu" and "parameters" in what:
            self.policy.to(self.device)
        if self.device.type != "cpu" and "optimizer" in what:
            self.optimizer.to(self.device)

    def _barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def _dtype_name(config: Config, device: torch.device) -> str:
    name = config.train.dtype
    return name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"


def optimizer_steps(stage: Config) -> int:
    """Optimizer steps of a whole stage."""
    rollout, train = stage.rollout, stage.train
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    a_rollout = -(-rollouts // train.global_batch_size) if train.global_batch_size else train.num_steps_per_rollout
    return max(1, rollout.num_rollout * a_rollout)


def _not_finite(batch: Batch, bad: list[int], loss: float, norm: float) -> TrainerError:
    ids = [batch.sample_ids[i] for i in bad]
    shown = ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")
    what = f"the loss of samples {shown} is not finite" if bad else f"the gradient norm is {norm}, the loss {loss}"
    return TrainerError(
        what,
        code="TRN95",
        where=f"step {batch.version}" + (f", samples {shown}" if bad else f", {len(batch)} samples"),
        why="no weight was changed by this optimizer step",
        fix="lower train.lr, or set train.clip_grad=1.0",
    )
