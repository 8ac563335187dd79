"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434) over packs, in place of megatron-core's.

hidden -> q down, norm, up -> heads: [plain | rotary]          hidden -> kv down -> [latent | one rotary key for all]
                                                                latent -> norm, up -> heads: [plain key | value]

megatron-core 0.16's own module cannot be built where Transformer Engine is missing, and has one epsilon for all norms.
This one has its parameters, names and parallel forms: down projections are column-parallel and gathered, norms see the
rows of this rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding, apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from slime_megatron.attention import CoreAttention
from slime_megatron.norms import Norm

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig

    from slime_megatron.packing import Pack


EPSILON = 1e-6
"""Of latents' norms: the models' own code and transformers have it whatever ``rms_norm_eps`` says."""


class LatentAttention(MegatronModule):  # type: ignore[misc]
    """[T, 1, hidden] to the same; with sequence parallelism both are this rank's rows."""

    def __init__(
        self, config: MLATransformerConfig, submodules: Any, layer_number: int, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.tp = pg_collection.tp
        self.heads = config.num_attention_heads // self.tp.size()
        self.width = config.qk_head_dim + config.qk_pos_emb_head_dim
        every = config.num_attention_heads
        if config.q_lora_rank is None:
            self.linear_q_proj = self._column(config.hidden_size, every * self.width)
        else:
            self.linear_q_down_proj = self._column(config.hidden_size, config.q_lora_rank)
            self.q_layernorm = Norm(config, config.q_lora_rank, EPSILON)
            self.linear_q_up_proj = self._column(config.q_lora_rank, every * self.width)
        self.linear_kv_down_proj = self._column(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = Norm(config, config.kv_lora_rank, EPSILON)
        self.linear_kv_up_proj = self._column(config.kv_lora_rank, every * (config.qk_head_dim + config.v_head_dim))
        self.linear_proj = RowParallelLinear(
            every * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp,
        )
        magnitude = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
        self.core_attention = CoreAttention(
            config,
            layer_number,
            None,
            "self",
            softmax_scale=magnitude**2 / math.sqrt(self.width),
            pg_collection=pg_collection,
        )
        self.rotary_pos_emb = self._rotary(config)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Attention over the pack in ``packed_seq_params``; the output, and its bias or None."""
        pack: Pack = kwargs["packed_seq_params"]
        query, key, value = self._heads(hidden_states, pack)
        core = self.core_attention
        if self.config.recompute_granularity == "selective" and "core_attn" in self.config.recompute_modules:
            from torch.utils.checkpoint import checkpoint

            out = checkpoint(core, query, key, value, packed_seq_params=pack, use_reentrant=False)
        else:
            out = core(query, key, value, packed_seq_params=pack)
        output, bias = self.linear_proj(out)
        return output, bias

    def _heads(self, hidden: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k [T, heads, width], v [T, heads, d of v], of this rank's heads."""
        config, down = self.config, hidden
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            down = self._whole(self.linear_q_down_proj(hidden)[0])
            query, _ = self.linear_q_up_proj(self.q_layernorm(self._local_rows(down)))
        both = self._whole(self.linear_kv_down_proj(hidden)[0])
        latent, turned = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        turned = copy_to_tensor_model_parallel_region(turned, group=self.tp)  # each rank's heads give it a gradient
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(self._local_rows(latent)))
        query = query[:, 0].unflatten(-1, (self.heads, self.width))
        up = up[:, 0].unflatten(-1, (self.heads, config.qk_head_dim + config.v_head_dim))
        plain, rotary = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key, value = up.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        embedding = self.rotary_pos_emb(pack)
        angles, magnitude = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
        rotary, shared = (self._turn(x, angles, magnitude) for x in (rotary, turned))  # the key [T, 1, d]
        query = torch.cat([plain, rotary], dim=-1)
        key = torch.cat([key, shared.expand(-1, self.heads, -1)], dim=-1)
        return query, key, value

    def _turn(self, x: torch.Tensor, angles: torch.Tensor, magnitude: float) -> torch.Tensor:
        turned: torch.Tensor = apply_rotary_pos_emb(
            x, angles, self.config, mscale=magnitude, cp_group=self.pg_collection.cp
        )
        return turned

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """All columns of a column-parallel layer's output, on every rank."""
        whole: torch.Tensor = gather_from_tensor_model_parallel_region(part, group=self.tp)
        return whole

    def _local_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows, where the sequence is shared."""
        if not self.config.sequence_parallel:
            return rows
        local: torch.Tensor = scatter_to_sequence_parallel_region(rows, group=self.tp)
        return local

    def _column(self, inside: int, outside: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inside,
            outside,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp,
        )

    def _rotary(self, config: MLATransformerConfig) -> Any:
        if config.rope_type == "rope":
            return RotaryEmbedding(
                config.qk_pos_emb_head_dim,
                rotary_percent=config.rotary_percent,
                rotary_base=config.rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
        return YarnRotaryEmbedding(
            config.qk_pos_emb_head_dim,
            rotary_base=config.rotary_base,
            scaling_factor=config.rotary_scaling_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            mscale=config.mscale,
            mscale_all_dim=config.mscale_all_dim,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
