"""One rank of the FSDP2 trainer: its models, optimizers and stage, and what every call is made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers.fsdp.critic import Critic
from slime_core.trainers.fsdp.frozen import Frozen
from slime_core.trainers.fsdp.learner import Learner
from slime_core.trainers.fsdp.passes import backward
from slime_core.trainers.fsdp.policy import Policy
from slime_core.trainers.fsdp.sharding import full, join, local, shard
from slime_core.trainers.micro import pack
from slime_core.trainers.parking import Parking
from slime_core.trainers.portion import Portion, Seat
from slime_core.trainers.share import Guard, Sums
from slime_core.trainers.staging import Staging
from slime_core.weights.flops import Flops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Loss
    from slime_core.types import MicroBatch
    from slime_core.weights.folder import ModelFolder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]


class Rank:
    """What a rank holds; `worker.Worker` adds the calls of the trainer."""

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
        self.plugins, self.folder, self.seed = plugins, folder, config.seed
        self.dtype = DTYPES[dtype_name(config, self.device)]
        self.mesh = join(rank, world, device, rendezvous)
        model: Any = folder.build_model("float32", self.seed)
        self.policy = Policy(
            model.to(self.device).eval().requires_grad_(True), chunk=config.train.logprob_chunk_tokens
        )
        self.policy.try_model()
        self.policy.choose_compiling(config.train.compile)
        shard(self.policy, self.mesh, self.dtype)
        self.actor = Learner(self.policy, rank, world)
        self.frozen = Frozen(folder, self.mesh, self.dtype, self.device)
        self.critic: Critic | None = None
        self.staging = Staging(self.device)
        self.parking = Parking(self._tensors)
        self.guard = Guard(errors=errors if rank == 0 else None)
        self.seat = Seat(number=rank, ranks=world, over=1, flops=Flops.of(folder.config))
        self.stage: Config | None = None
        self.steps = 0  # calls of step in this stage
        self.loss: Loss

    def parameters(self) -> Tensors:
        """The policy's parameters by their names in the folder, tied ones once; DTensors."""
        return self.actor.parameters()

    def locals(self) -> Tensors:
        """This rank's shards of the parameters."""
        return self.actor.locals()

    def whole(self) -> Tensors:
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

    def run_backward(self, micros: list[MicroBatch], sums: Sums) -> None:
        """The policy's gradients of one optimizer step, and its sums."""
        assert self.stage is not None
        for number, micro in enumerate(micros):
            self.actor.reduce_gradients(number + 1 == len(micros))
            backward(self.policy, self.loss, self.stage.train, micro, self.temperature(micro), sums)

    def forget(self) -> None:
        """Drop all gradients."""
        for learner in self.learners():
            learner.forget()

    def learners(self) -> list[Learner]:
        return [self.actor] if self.critic is None else [self.actor, self.critic.learner]

    def packs(self, portion: Portion, model: Policy | None = None) -> list[list[MicroBatch]]:
        assert self.stage is not None
        most = self.stage.train.max_tokens_per_gpu
        return pack(portion, max_tokens=most, alone=not (model or self.policy).packs)

    def temperature(self, micro: MicroBatch) -> torch.Tensor | None:
        """Of each response token's draw; None where all are 1."""
        if micro.temperature is None or (micro.temperature == 1).all():
            return None
        return torch.from_numpy(micro.temperature).to(self.device)

    def _tensors(self, what: str) -> Iterable[torch.Tensor]:
        """What a name of `release` stands for, this rank's shards of it; gradients are forgotten instead."""
        if what == "parameters":
            mine = [local(p.detach()) for learner in self.learners() for p in learner.parameters().values()]
            return [*mine, *self.frozen.tensors()]
        return [tensor for learner in self.learners() for tensor in learner.states()] if what == "optimizer" else []


def dtype_name(config: Config, device: torch.device) -> str:
    name = config.train.dtype
    return name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"
