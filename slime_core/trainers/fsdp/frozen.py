"""Models that do not learn: the reference, a second set of the policy's weights, and the teacher, a model of its own.

A stage holds what its estimator and loss say they read (`Plugins.needs`). Both score with the policy's temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers import roles
from slime_core.trainers.fsdp.experts import router_biases
from slime_core.trainers.fsdp.model import FsdpPolicy, shard
from slime_core.trainers.fsdp.shards import local, own_part
from slime_core.weights.loading import moved_to

if TYPE_CHECKING:
    from slime_core.protocols import Role
    from slime_core.trainers.fsdp.model import FsdpLearner
    from slime_core.trainers.fsdp.ranks import FsdpRanks
    from slime_core.types import Batch
    from slime_core.weights.folder import ModelFolder

Tensors = dict[str, torch.Tensor]


class FsdpFrozen:
    """The reference and the teacher of a stage, each where it is needed."""

    def __init__(self, folder: ModelFolder, ranks: FsdpRanks, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._ranks, self._dtype, self._device = folder, ranks, dtype, device
        self.reference: Tensors | None = None
        self.teacher: FsdpPolicy | None = None
        self._teacher_path = ""
        self._teacher_vocab = 0

    def begin(self, needs: frozenset[Role], train: Any, policy: FsdpLearner) -> None:
        """Make what the stage needs, and drop the rest; the reference is the policy as it is now, or ``ref_load``'s.

        Of adapters it is the base, which is no further set of weights.

        Raises:
            TrainerError: TRN104 another architecture (reference) or vocabulary; a teacher that is not named.
        """
        self.reference = self._reference(train.ref_load, policy) if "reference" in needs else None
        if "teacher" not in needs:
            self.teacher, self._teacher_path = None, ""
        else:
            roles.teacher_of(train)
            self._begin_teacher(train)

    def _reference(self, path: str, policy: FsdpLearner) -> Tensors:
        if not path and policy.module.adapters is not None:
            return {}
        if not path:
            return {name: tensor.clone() for name, tensor in (policy.locals() | policy.biases()).items()}
        folder = roles.open_model("train.ref_load", path, self._folder)
        parameters = policy.module.base()
        built = folder.build_model(_dtype_name(parameters), put=moved_to(self._device))
        model = built.to(self._device)  # type: ignore[arg-type]
        reference = dict(model.named_parameters())
        policys, references = ({name: tuple(p.shape) for name, p in one.items()} for one in (parameters, reference))
        roles.same_tensors("train.ref_load", folder, policys, references, self._folder)
        weights = {name: own_part(tensor.detach(), parameters[name]).clone() for name, tensor in reference.items()}
        return weights | router_biases(model)

    def _begin_teacher(self, train: Any) -> None:
        if self.teacher is None or self._teacher_path != train.teacher_load:
            folder = roles.open_model("train.teacher_load", train.teacher_load, self._folder)
            roles.same_layout(folder, self._folder)
            self.teacher = None
            built = folder.build_model("float32", put=moved_to(self._device))
            teacher = FsdpPolicy(built.to(self._device).eval(), chunk=train.logprob_chunk_tokens)
            teacher.try_model()
            teacher.share_packs(self._ranks)
            teacher.choose_compiling(train.compile)
            for parameter in teacher.parameters():  # tried in float32, kept in the dtype it computes in
                parameter.data = parameter.data.to(self._dtype)
                parameter.requires_grad_(False)
            shard(teacher, self._ranks, torch.float32)
            self.teacher, self._teacher_path, self._teacher_vocab = teacher, train.teacher_load, folder.vocab_size
        self.teacher.chunk = train.logprob_chunk_tokens

    @contextmanager
    def as_reference(self, policy: FsdpLearner) -> Iterator[None]:
        """The policy computes with the reference's weights inside the block."""
        assert self.reference is not None
        with policy.computing_with(self.reference):
            yield

    def check_teacher(self, batch: Batch) -> None:
        """Refuse tokens that the teacher has no row for (padding of the policy's embedding).

        Raises:
            TrainerError: TRN104 with the sample.
        """
        roles.check_teacher(batch, self._teacher_vocab, self._teacher_path, self._folder)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's shards of all weights."""
        tensors = list(self.reference.values()) if self.reference is not None else []
        if self.teacher is not None:
            tensors += [local(parameter.detach()) for parameter in self.teacher.parameters()]
        return tensors


def _dtype_name(parameters: Tensors) -> str:
    return str(next(iter(parameters.values())).dtype).removeprefix("torch.")
