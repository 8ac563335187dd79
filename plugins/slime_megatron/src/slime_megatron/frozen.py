"""Models that do not learn: the reference, a second set of the policy's shards, and the teacher, a model of its own.

A stage holds what its estimator and loss say they read (`Plugins.needs`). Both score with the policy's temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import DataError
from slime_core.trainers import roles
from slime_core.weights.shards import Shards
from slime_megatron.convert.conversion import DistTensors
from slime_megatron.convert.dist import is_dist
from slime_megatron.model import Model, build_model
from slime_megatron.others import settings_of
from slime_megatron.tensors import stored

if TYPE_CHECKING:
    from slime_core.protocols import Role
    from slime_core.types import Batch
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.others import ModelContext

Tensors = dict[str, torch.Tensor]


class MegatronFrozen:
    """The reference and the teacher of a stage, each where it is needed."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self.reference: Tensors | None = None
        self.teacher: Model | None = None
        self._teacher_path = ""
        self._teacher_vocab = 0

    def begin(self, needs: frozenset[Role], train: Any, policy: Model, run: ModelContext) -> None:
        """Make what the stage needs, and drop the rest; the reference is the policy as it is now, or ``ref_load``'s.

        Raises:
            TrainerError: TRN104 another architecture (reference) or vocabulary; a teacher that is not named, or that
                does not see pictures as the policy does.
            DataError: a reference in a torch_dist folder that is damaged or does not fit (TOK46, TOK201 to TOK203).
        """
        self.reference = self._reference(train.ref_load, policy, run) if "reference" in needs else None
        if "teacher" not in needs:
            self.teacher, self._teacher_path = None, ""
            return
        path = roles.teacher_of(train)
        if self.teacher is None or self._teacher_path != path:
            self.teacher = None
            folder = roles.open_model("train.teacher_load", path, self._folder)
            roles.same_layout(folder, self._folder)
            bridge = run.bridge(folder.config)
            self.teacher = build_model(settings_of(folder, bridge, run), bridge, folder, run.device)
            self.teacher.stage.requires_grad_(False)
            self._teacher_path, self._teacher_vocab = path, folder.vocab_size
        self.teacher.passes.chunk = train.logprob_chunk_tokens

    def _reference(self, path: str, policy: Model, run: ModelContext) -> Tensors:
        """This rank's shards of the reference: the policy as it is, a model folder's, or a torch_dist folder's.

        Nothing where it is the base of the policy's adapter.
        """
        if not path and policy.adapter is not None:
            return {}
        tensors = policy.tensors.of_model()
        if not path:
            return {name: shard.tensor.detach().clone() for name, shard in tensors.by_name.items()}
        if is_dist(Path(path)):
            config = self._folder.config
            try:
                return tensors.read(DistTensors.open(Path(path), config, run.bridge(config)))
            except DataError as error:
                error.where = f"train.ref_load = {path}: {error.where}"
                raise
        folder = roles.open_model("train.ref_load", path, self._folder)
        policy_shapes = {n: shape for entry in tensors.entries for n, shape in zip(entry.hf, entry.shapes)}
        ahead, infos = policy.tensors.sizes.ahead, Shards.open(folder.path).infos
        reference_shapes = {name: info.shape for name, info in infos.items() if not name.startswith(ahead)}
        if policy.tensors.sizes.tied and folder.config.tie_word_embeddings:
            reference_shapes.pop("lm_head.weight", None)
        roles.same_tensors("train.ref_load", folder, policy_shapes, reference_shapes, self._folder)
        return tensors.read(stored(folder))

    @contextmanager
    def as_reference(self, policy: Model) -> Iterator[None]:
        """The policy computes with the reference's weights inside the block, and without its adapter."""
        assert self.reference is not None
        with policy.adapter.switch.base() if policy.adapter is not None else nullcontext():
            with self._put_on(policy, self.reference) if self.reference else nullcontext():
                yield

    @contextmanager
    def _put_on(self, policy: Model, reference: Tensors) -> Iterator[None]:
        tensors = {name: shard.tensor for name, shard in policy.tensors.of_model().by_name.items()}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            _put(policy, reference)
            yield
        finally:
            _put(policy, copies)

    def check_teacher(self, batch: Batch) -> None:
        """Refuse tokens that the teacher has no row for (padding of the policy's embedding).

        Raises:
            TrainerError: TRN104 with the sample.
        """
        roles.check_teacher(batch, self._teacher_vocab, self._teacher_path, self._folder)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights."""
        if self.reference is not None:
            yield from self.reference.values()
        if self.teacher is not None:
            yield from self.teacher.stage.parameters()


@torch.no_grad()
def _put(policy: Model, weights: Tensors) -> None:
    for name, weight in weights.items():
        policy.tensors.by_name[name].tensor.copy_(weight)
    policy.spread_embedding()
