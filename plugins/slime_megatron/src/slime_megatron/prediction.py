"""A layer that predicts one token further ahead (DeepSeek V3, arXiv:2412.19437, section 2.2), beside the model.

hidden state of position i --norm-----+--projection--> layer like the last --norm--> output matrix --> token i + 2
embedding of token i + 1 --norm-------+

Hidden states, embedding and output matrix get no gradient of it: the policy is trained as without it. Sequences that
share a prompt are apart here, since the last position of the prompt is followed by another token in each.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch.nn.functional import embedding

from slime_core.types import MicroBatch
from slime_megatron.norms import Norm
from slime_megatron.packing import owned

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from numpy.typing import NDArray

    from slime_megatron.packing import Pack


class PredictionLayer(MegatronModule):  # type: ignore[misc]
    """Named as megatron-core's MultiTokenPredictionLayer, which takes no packs of ours.

    Args:
        spec: of a decoder layer
        place: ``layer_number`` in its chunk of layers, ``vp_stage`` and ``pg_collection``, as that layer has them
    """

    def __init__(self, config: TransformerConfig, spec: Any, **place: Any) -> None:
        super().__init__(config=config)
        self.tp = place["pg_collection"].tp
        hidden = config.hidden_size
        self.enorm = Norm(config, hidden, config.layernorm_epsilon)
        self.hnorm = Norm(config, hidden, config.layernorm_epsilon)
        self.eh_proj = ColumnParallelLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp,
        )
        layer_config = copy(config)
        layer_config.moe_aux_loss_coeff, layer_config.moe_z_loss_coeff = (
            0.0,
            None,
        )  # these are of the model's own layers
        self.transformer_layer = build_module(spec, config=layer_config, **place)
        self.final_layernorm = Norm(config, hidden, config.layernorm_epsilon)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Hidden states of positions and embeddings of the tokens behind them, [T, 1, h] each, to [T, 1, h]."""
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        x = gather_from_tensor_model_parallel_region(self.eh_proj(both)[0], group=self.tp)
        if self.config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x, group=self.tp)
        x, _ = self.transformer_layer(x, attention_mask=None, packed_seq_params=pack)
        normed: torch.Tensor = self.final_layernorm(x)
        return normed


class PredictionBlock(MegatronModule):  # type: ignore[misc]
    """The one layer, under megatron-core's name for it."""

    def __init__(self, config: TransformerConfig, spec: Any, **place: Any) -> None:
        super().__init__(config=config)
        self.layers = torch.nn.ModuleList([PredictionLayer(config, spec, **place)])


def unshared(micro: MicroBatch) -> tuple[MicroBatch, NDArray[np.int64]]:
    """What the layer computes of a micro-batch, and for each of its rows the row of ``micro`` with the hidden state.

    Its tokens are those behind each position (0 behind the last), its prompts whole in every sequence, its targets
    the response tokens that have two tokens before them.
    """
    bounds, prefix = micro.cu_seqlens.astype(np.int64), micro.prefix
    heads = set(prefix[prefix >= 0].tolist())
    members = [n for n in range(len(prefix)) if n not in heads]
    counts = np.bincount(micro.columns["sample"].astype(np.int64), minlength=len(members))
    rows, tokens, predict, columns, before = [], [], [], [], 0
    for member, count, first in zip(members, counts, np.cumsum(counts) - counts, strict=True):
        segments = [member] if prefix[member] < 0 else [int(prefix[member]), member]
        places = np.concatenate([np.arange(bounds[n], bounds[n + 1]) for n in segments])
        rows.append(places)
        tokens.append(np.append(micro.tokens[places[1:]], 0))
        positions = np.arange(len(places) - count, len(places)) - 2
        columns.append(first + np.flatnonzero(positions >= 0))
        predict.append(before + positions[positions >= 0])
        before += len(places)
    responses = np.concatenate(columns)
    lengths = [len(places) for places in rows]
    ahead = replace(
        micro,
        tokens=np.concatenate(tokens),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        prefix=np.full(len(rows), -1, np.int32),
        predict=np.concatenate(predict),
        target=micro.target[responses],
        response=micro.response[responses],
        weight=micro.weight[responses],
    )
    return ahead, np.concatenate(rows)


@torch.no_grad()
def rows_of(hidden: torch.Tensor, pack: Pack, rows: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Rows of a micro-batch's hidden states, which its ranks share: [T, 1, h] of this rank to [rows, 1, h].

    Args:
        rows: of the micro-batch
    """
    groups = [parallel_state.get_context_parallel_group()]
    if config.sequence_parallel:
        groups.insert(0, parallel_state.get_tensor_model_parallel_group())
    for group in groups:
        parts = [torch.empty_like(hidden) for _ in range(group.size())]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        hidden = torch.cat(parts)
    size = groups[-1].size()
    place = torch.empty(pack.rows, dtype=torch.int64)
    place[np.concatenate([owned(pack.rows, size, rank) for rank in range(size)])] = torch.arange(pack.rows)
    return hidden[place.to(hidden.device)[rows]]


@torch.no_grad()
def embedded(tokens: torch.Tensor, weight: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Embeddings of ids, [T] to [T, 1, h]; with sequence parallelism this rank's rows.

    Args:
        weight: [V / ranks, h], the rows of this tensor-parallel rank
    """
    group = parallel_state.get_tensor_model_parallel_group()
    local = tokens - group.rank() * len(weight)
    inside = (local >= 0) & (local < len(weight))
    vectors = embedding(torch.where(inside, local, 0), weight) * inside[:, None]
    dist.all_reduce(vectors, group=group)
    if config.sequence_parallel:
        vectors = vectors.chunk(group.size())[group.rank()]
    column: torch.Tensor = vectors[:, None]
    return column
