"""The critic of PPO: a value model that learns beside the policy, in the same optimizer steps and from the same packs.

    tokens -> layers -> hidden state of the position that predicts a response token -> score -> its value

Its parameters are named as in transformers' ForTokenClassification models: ``model.*``, ``score.weight``,
``score.bias``. They and the moments are saved as `critic.safetensors` and `critic_moments.safetensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime_core.errors import TrainerError
from slime_core.trainers import roles
from slime_core.trainers.fsdp.model import FsdpLearner, FsdpPolicy, shard
from slime_core.trainers.fsdp.packs import RankPack
from slime_core.trainers.roles import KEY, open_critic
from slime_core.trainers.vision import PackPixels
from slime_core.weights import build
from slime_core.weights.loading import moved_to

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.attention import PackSegments
    from slime_core.trainers.fsdp.places import DevicePlace
    from slime_core.trainers.fsdp.ranks import FsdpRanks
    from slime_core.trainers.optimizer_step import LossSums
    from slime_core.types import MicroBatch
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.shards import Shards


class FsdpCritic:
    """A sharded value model with its optimizer. ``path`` is ``train.critic_load``; empty copies the policy."""

    def __init__(
        self,
        train: Any,
        policy: FsdpLearner,
        folder: ModelFolder,
        ranks: FsdpRanks,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        place: DevicePlace,
    ) -> None:
        self.path = str(train.critic_load)
        self.device = device
        self.model: ValueModel = build_values(self.path, folder, seed, device, train.logprob_chunk_tokens)
        self.model.freeze(train)
        self.model.share_packs(ranks)
        self.model.choose_compiling(train.compile)
        shard(self.model, ranks, dtype, exact=(self.model.score,), place=place)
        self.learner = FsdpLearner(self.model, policy.rank, policy.world)
        if not self.path:
            parameters, policy_shards = self.learner.locals(), policy.locals()
            for name in parameters.keys() & policy_shards.keys():
                parameters[name].copy_(policy_shards[name])
            self.learner.refresh()

    def begin(self, train: Any, optimizer_steps: int) -> None:
        """A stage: a fresh optimizer; warms up to ``critic_lr`` and decays as the policy's rate does."""
        self.value_clip = float(train.value_clip)
        self.model.choose_recomputing(train)
        self.learner.begin(train, roles.critic_schedule(train, optimizer_steps))

    def backward(self, micros: list[MicroBatch], sums: LossSums) -> None:
        """Add one optimizer step's gradients, and its sums: ``loss``, and per-token metrics by weight."""
        for micro in micros:
            counted = self.model.ranks is None or self.model.ranks.number == 0
            roles.critic_loss(self.values(micro), micro, self.value_clip, sums, counted=counted).backward()
        self.model.sum_lanes()

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Of the position that predicts each response token, so before it is seen; [R]."""
        pack = RankPack(micro, self.device, self.model.ranks)
        return pack.spread(self.model(*pack.inputs, pack.predicting(pack.own_tokens), pixels=pack.pixels))


class ValueModel(FsdpPolicy):
    """The layers of a causal language model without its output matrix; the head computes in float32.

    A head that starts at zero gives the value 0 everywhere, and the layers' first gradient is 0: it learns first.
    """

    def __init__(self, hf: Any, *, chunk: int) -> None:
        super().__init__(hf, chunk=chunk)
        embedding = hf.get_input_embeddings().weight
        size = int(hf.config.get_text_config().hidden_size)
        self.score = nn.Linear(size, 1, device=embedding.device)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def drop_output(self) -> None:
        """Free the output matrix; after `try_model`, which compares logits."""
        self.hf.set_output_embeddings(nn.Identity())

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segments: PackSegments,
        predict: torch.Tensor,
        pixels: PackPixels | None = None,
    ) -> torch.Tensor:
        """The value at each row of ``predict``, [R] float32; arguments as in `types.MicroBatch`, as tensors."""
        hidden = self.hidden(tokens, position_ids, segments, pixels).index_select(0, predict)
        values: torch.Tensor = self.score(hidden.float()).sum(1)  # of one column; FSDP wants no view
        return values


def build_values(path: str, policy: ModelFolder, seed: int, device: torch.device, chunk: int) -> ValueModel:
    """The value model of ``train.critic_load``, or with the layers of the policy's folder; in float32, not sharded.

    A folder with ``score.weight`` or ``value_head.weight`` of shape [1, hidden] brings its own head. A causal language
    model starts with a head of zeros.

    Raises:
        TrainerError: TRN104 another vocabulary, or no last hidden state to put a head on.
        DataError: TOK46 tensors that do not fit, a head of another shape among them.
    """
    folder, stored, head = open_critic(path, policy)
    if stored is not None:
        hf: Any = build.allocate(folder.config, "float32", "cpu", None, folder.trust_remote_code)
        _load_layers(hf, stored, head, folder)
    else:
        hf = folder.build_model("float32", seed, put=moved_to(device))
    if hf.base_model is hf:
        raise TrainerError(
            f"{type(hf).__name__} has no layers of its own to put a value head on",
            code="TRN104",
            where=f"{KEY} = {path or policy.path}",
        )
    model = ValueModel(hf.to(device).eval().requires_grad_(True), chunk=chunk)
    if stored is not None:
        _load_head(model, stored, head)
    model.try_model()
    model.drop_output()
    return model


@torch.no_grad()
def _load_layers(hf: Any, stored: Shards, head: str, folder: ModelFolder) -> None:
    """Copy every tensor but the output matrix, which is given the embedding's values: it is tried, then dropped."""
    output, embedding = hf.get_output_embeddings(), hf.get_input_embeddings().weight
    outputs = {f"{name}.{part}" for name, m in hf.named_modules() if m is output for part in ("weight", "bias")}
    state = {name: tensor for name, tensor in hf.state_dict().items() if name not in outputs}
    infos, heads = stored.infos, {f"{head}.weight", f"{head}.bias"}
    fit = build.Fit(missing=sorted(set(state) - set(infos)), extra=sorted(set(infos) - set(state) - heads - outputs))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name in infos}
    shapes[f"{head}.weight"] = (1, int(hf.config.get_text_config().hidden_size))
    fit.shapes = [(n, infos[n].shape, shape) for n, shape in sorted(shapes.items()) if infos[n].shape != shape]
    if not fit:
        raise build.misfit(fit, folder.path)
    for name, tensor in state.items():
        tensor.copy_(stored[name])
    for parameter in output.parameters() if output is not None else ():
        if parameter is not embedding:
            parameter.copy_(embedding if parameter.shape == embedding.shape else torch.zeros_like(parameter))


@torch.no_grad()
def _load_head(model: ValueModel, stored: Shards, head: str) -> None:
    model.score.weight.copy_(stored[f"{head}.weight"])
    if f"{head}.bias" in stored.infos:
        model.score.bias.copy_(stored[f"{head}.bias"])
