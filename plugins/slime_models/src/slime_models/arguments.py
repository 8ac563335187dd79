"""A model as MODEL_ARGS, the flags by which slime's scripts describe one to Megatron-LM.

Only flags that describe the model: how it runs (dispatchers, fusions, parallel sizes) is the run's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slime_convert.bridge import Bridge

ALWAYS = object()


@dataclass(slots=True, frozen=True)
class Said:
    """A flag and the field it speaks of. ``when``: a switch, there for this value. ``unless``: left out for this."""

    flag: str
    field: str
    when: Any = ALWAYS
    unless: Any = ALWAYS


FLAGS = (
    Said("--swiglu", "gated_linear_unit", when=True),
    Said("--num-layers", "num_layers"),
    Said("--hidden-size", "hidden_size"),
    Said("--ffn-hidden-size", "ffn_hidden_size"),
    Said("--num-attention-heads", "num_attention_heads"),
    Said("--group-query-attention", "grouped", when=True),
    Said("--num-query-groups", "num_query_groups"),
    Said("--kv-channels", "kv_channels"),
    Said("--max-position-embeddings", "max_sequence_length"),
    Said("--use-rotary-position-embeddings", "position_embedding_type", when="rope"),
    Said("--disable-bias-linear", "add_bias_linear", when=False),
    Said("--add-qkv-bias", "add_qkv_bias", when=True),
    Said("--normalization", "normalization"),
    Said("--norm-epsilon", "layernorm_epsilon"),
    Said("--rotary-base", "rotary_base"),
    Said("--rotary-percent", "rotary_percent", unless=1.0),
    Said("--rotary-interleaved", "rotary_interleaved", when=True),
    Said("--use-rope-scaling", "rope_scaling", when=True),
    Said("--rotary-scaling-factor", "stretched", unless=None),
    Said("--vocab-size", "vocab_size"),
    Said("--apply-layernorm-1p", "layernorm_zero_centered_gamma", when=True),
    Said("--qk-layernorm", "qk_layernorm", when=True),
    Said("--attention-output-gate", "attention_output_gate", when=True),
    Said("--post-self-attn-layernorm", "sandwich", when=True),
    Said("--post-mlp-layernorm", "sandwich", when=True),
    Said("--untie-embeddings-and-output-weights", "share_embeddings_and_output_weights", when=False),
    # linear attention
    Said("--linear-attention-freq", "linear_attention_freq"),
    Said("--linear-conv-kernel-dim", "linear_conv_kernel_dim"),
    Said("--linear-key-head-dim", "linear_key_head_dim"),
    Said("--linear-value-head-dim", "linear_value_head_dim"),
    Said("--linear-num-key-heads", "linear_num_key_heads"),
    Said("--linear-num-value-heads", "linear_num_value_heads"),
    # latent attention
    Said("--multi-latent-attention", "multi_latent_attention", when=True),
    Said("--q-lora-rank", "q_lora_rank", unless=None),
    Said("--kv-lora-rank", "kv_lora_rank"),
    Said("--qk-head-dim", "qk_head_dim"),
    Said("--qk-pos-emb-head-dim", "qk_pos_emb_head_dim"),
    Said("--v-head-dim", "v_head_dim"),
    Said("--rope-type", "rope_type"),
    Said("--original-max-position-embeddings", "original_max_position_embeddings"),
    Said("--beta-fast", "beta_fast"),
    Said("--beta-slow", "beta_slow"),
    Said("--mscale", "mscale"),
    Said("--mscale-all-dim", "mscale_all_dim"),
    # experts
    Said("--num-experts", "num_moe_experts", unless=None),
    Said("--moe-layer-freq", "moe_layer_freq"),
    Said("--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
    Said("--moe-shared-expert-intermediate-size", "moe_shared_expert_intermediate_size"),
    Said("--moe-shared-expert-gate", "moe_shared_expert_gate", when=True),
    Said("--moe-router-topk", "moe_router_topk"),
    Said("--moe-router-num-groups", "moe_router_num_groups", unless=None),
    Said("--moe-router-group-topk", "moe_router_group_topk", unless=None),
    Said("--moe-router-score-function", "moe_router_score_function"),
    Said("--moe-router-pre-softmax", "moe_router_pre_softmax", when=True),
    Said("--moe-router-topk-scaling-factor", "moe_router_topk_scaling_factor"),
    Said("--moe-router-enable-expert-bias", "moe_router_enable_expert_bias", when=True),
    Said("--moe-router-bias-update-rate", "moe_router_bias_update_rate"),
    Said("--moe-router-dtype", "moe_router_dtype"),
)


def model_args(bridge: Bridge, config: Any) -> list[str]:
    """``["--swiglu", "--num-layers 36", ...]``, each quoted as a shell wants it."""
    fields, sizes = bridge.megatron(config), bridge.sizes(config)
    if sizes.groups == sizes.heads:
        del fields["num_query_groups"]
    if not sizes.experts:
        fields = {name: value for name, value in fields.items() if "moe" not in name}
    if fields.get("rope_type") == "rope":
        yarn = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        fields = {name: value for name, value in fields.items() if name not in yarn}
    fields |= {
        "grouped": sizes.groups < sizes.heads,
        "sandwich": bridge.sandwich,
        "stretched": fields.get("rotary_scaling_factor" if bridge.attention == "mla" else "rope_scaling_factor"),
        "vocab_size": sizes.vocab,
    }
    if not fields.get("rope_scaling") and bridge.attention != "mla":
        fields["stretched"] = None
    return [_written(row, fields[row.field]) for row in FLAGS if row.field in fields and _is_said(row, fields)]


def _is_said(row: Said, fields: dict[str, Any]) -> bool:
    value = fields[row.field]
    if row.when is not ALWAYS:
        return bool(value == row.when)
    return row.unless is ALWAYS or value != row.unless


def _written(row: Said, value: Any) -> str:
    if row.when is not ALWAYS:
        return row.flag
    if isinstance(value, list):
        return f'{row.flag} "{pattern(value)}"'
    return f"{row.flag} {value}"


def pattern(layers: list[int]) -> str:
    """``[0]*1+[1]*26``: as Megatron-LM reads ``--moe-layer-freq``."""
    return "+".join(f"[{kind}]*{len(list(run))}" for kind, run in groupby(layers))
