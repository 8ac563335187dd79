"""This rank's stage of a value model: the policy's layers, and a scalar head behind the last.

    pack -> layers -> hidden state of the position that predicts a response token -> score -> its value

The head is a copy on every tensor-parallel rank, computes in float32, and sees whole rows: its gradient is the same on
all of them, so nothing is summed over them, and each gives the layers back the gradient of its own rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

from slime_convert.bridge import Entry, check_tensors
from slime_core.trainers.roles import open_critic
from slime_megatron.model import Model, PackedGPT, build_stage
from slime_megatron.others import settings_of
from slime_megatron.settings import MegatronSettings
from slime_megatron.tensors import Tensors, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slime_convert.bridge import Bridge
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.shards import Shards
    from slime_megatron.others import ModelContext
    from slime_megatron.packing import Pack

OUTPUT = "output_layer.weight"


class ValueGPT(PackedGPT):
    """PackedGPT whose last stage ends in ``score`` in place of the output matrix. Starts at zero."""

    def __init__(self, config: Any, bridge: Bridge, *, vocab: int, **kwargs: Any) -> None:
        super().__init__(config, bridge, vocab=vocab, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            with torch.device("cpu"):
                self.score_head = nn.Linear(config.hidden_size, 1)
            nn.init.zeros_(self.score_head.weight)
            nn.init.zeros_(self.score_head.bias)

    def predicting(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        """The rows that predict this rank's response tokens, [R, h]; each rank's gradient of them is the whole one."""
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp)
        assert pack.predict is not None
        return hidden[:, 0].index_select(0, pack.predict)

    def score(  # type: ignore[override]
        self, hidden: torch.Tensor, pack: Pack, target: torch.Tensor, temperature: torch.Tensor | None, *, chunk: int
    ) -> tuple[torch.Tensor]:
        """The value at each of this context-parallel rank's rows, [R] float32."""
        return (self.score_head(self.predicting(hidden, pack).float())[:, 0],)


def build_values(
    path: str, policy: ModelFolder, critic: Model, settings: MegatronSettings, run: ModelContext
) -> tuple[Model, ModelFolder]:
    """The value model of ``train.critic_load``, or with the layers that the policy has now; and its folder.

    A folder with ``score.weight`` or ``value_head.weight`` of shape [1, hidden] brings its own head. A causal language
    model starts with a head of zeros.

    Args:
        mine, made: the policy and its settings

    Raises:
        TrainerError: TRN104 another vocabulary.
        DataError: TOK46 tensors that do not fit, a head of another shape among them.
    """
    folder, shards, head = open_critic(path, policy)
    bridge = run.bridge(folder.config)
    settings = settings_of(folder, bridge, run) if path else settings
    weights: Mapping[str, torch.Tensor] | None = None
    if path:
        tensors_of_folder = _fitting(shards, head, bridge, folder) if shards is not None else stored(folder)
        weights = _Headed(tensors_of_folder, head, bridge.sizes(folder.config).hidden)
    stage = build_stage(ValueGPT, settings, bridge, folder.config, run.device)
    multiple, entries = settings.vocabulary_multiple, _entries(bridge, folder)
    tensors = Tensors(stage.chunks, bridge, folder.config, multiple=multiple, entries=entries)
    model = Model(stage, tensors, run.device)
    if weights is not None:
        model.fill(weights)
    else:
        copy(critic, model)
    return model, folder


@torch.no_grad()
def copy(policy: Model, values: Model) -> None:
    """Give the layers the policy's weights of now."""
    target, source = values.tensors.by_name, policy.tensors.by_name
    for name in target.keys() & source.keys():
        target[name].tensor.copy_(source[name].tensor)


def _entries(bridge: Bridge, folder: ModelFolder, head: str = "score") -> list[Entry]:
    hidden = bridge.sizes(folder.config).hidden
    entries = [entry for entry in bridge.entries(folder.config) if entry.megatron != OUTPUT]
    return [
        *entries,
        Entry("score_head.weight", (f"{head}.weight",), "whole", shapes=((1, hidden),)),
        Entry("score_head.bias", (f"{head}.bias",), "whole", shapes=((1,),)),
    ]


def _fitting(shards: Shards, head: str, bridge: Bridge, folder: ModelFolder) -> Shards:
    """The folder's tensors, names and shapes checked; an output matrix is let through."""
    outputs = {name for e in bridge.entries(folder.config) if e.megatron == OUTPUT for name in e.hf}
    infos = {name: info.shape for name, info in shards.infos.items() if name not in outputs}
    infos.setdefault(f"{head}.bias", (1,))
    check_tensors(_entries(bridge, folder, head), bridge.sizes(folder.config), infos, folder.path)
    return shards


class _Headed(dict[str, torch.Tensor]):
    """Tensors read when they are asked for; the head's by our names, zeros where the folder has none."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], head: str, hidden: int) -> None:
        super().__init__()
        self._tensors, self._head, self._hidden = tensors, head, hidden

    def __missing__(self, name: str) -> torch.Tensor:
        if not name.startswith("score."):
            return self._tensors[name]
        stored_as = name.replace("score.", f"{self._head}.")
        if stored_as in self._tensors:
            return self._tensors[stored_as]
        return torch.zeros(1) if name.endswith("bias") else torch.zeros(1, self._hidden)
