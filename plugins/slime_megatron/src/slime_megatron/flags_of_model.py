"""Flags that describe a model: slime's MODEL_ARGS. The folder's config.json says the same, or the flag is refused."""

from __future__ import annotations

from typing import Any

from slime_megatron.flags import MegatronFlag


def _is(name: str, kind: type, text: str, path: str = "", **more: Any) -> MegatronFlag:
    return MegatronFlag(name, kind, "model", text, {path or f"transformer.{name}": None}, **more)


def _means(name: str, text: str, **sets: Any) -> MegatronFlag:
    return MegatronFlag(name, bool, "model", text, {f"transformer.{path}": meant for path, meant in sets.items()})


MODEL = (
    _is("num_layers", int, "Layers."),
    _is("hidden_size", int, "Width between layers."),
    _is("ffn_hidden_size", int, "Width of dense MLPs."),
    _is("num_attention_heads", int, "Query heads."),
    _is("num_query_groups", int, "Key-value heads."),
    _is("kv_channels", int, "Width of a head."),
    _is("vocab_size", int, "Token ids, before filling.", "model.vocab_size"),
    _is("max_position_embeddings", int, "Positions the model was made for.", "model.max_sequence_length"),
    _is("normalization", str, "Kind of norms.", choices=("RMSNorm", "LayerNorm")),
    _is("norm_epsilon", float, "Epsilon of norms.", "transformer.layernorm_epsilon"),
    _is("layernorm_epsilon", float, "The same.", "transformer.layernorm_epsilon"),
    _means("apply_layernorm_1p", "Norm weights around 0.", layernorm_zero_centered_gamma=True),
    _is("qk_layernorm", bool, "Norms of queries and keys."),
    _is("qk_l2_norm", bool, "L2 norm of queries and keys."),
    _is("add_qkv_bias", bool, "Bias of queries, keys and values."),
    _means("disable_bias_linear", "No bias in other linear layers.", add_bias_linear=False),
    _means("swiglu", "Gated MLP with SiLU.", gated_linear_unit=True, activation_func="silu"),
    _means("quick_geglu", "Gated MLP with quick GELU.", activation_func="quick_gelu"),
    _means("squared_relu", "MLP with squared ReLU.", activation_func="squared_relu"),
    _is("glu_linear_offset", float, "Offset in a gated MLP."),
    _is("activation_func_clamp_value", float, "Bound of what enters the activation."),
    MegatronFlag(
        "untie_embeddings_and_output_weights",
        bool,
        "model",
        "An output matrix of its own.",
        {"model.share_embeddings_and_output_weights": False},
    ),
    MegatronFlag(
        "post_self_attn_layernorm", bool, "model", "Norm after attention too (GLM-4).", {"bridge.sandwich": True}
    ),
    MegatronFlag("post_mlp_layernorm", bool, "model", "Norm after the MLP too (GLM-4).", {"bridge.sandwich": True}),
    MegatronFlag(
        "position_embedding_type",
        str,
        "model",
        "Kind of positions.",
        {"model.position_embedding_type": None},
        ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
    ),
    MegatronFlag(
        "use_rotary_position_embeddings",
        bool,
        "model",
        "Rotary positions.",
        {"model.position_embedding_type": "rope"},
    ),
    _is("rotary_base", float, "Base of rotary angles.", "model.rotary_base"),
    _is("rotary_percent", float, "Share of a head that turns.", "model.rotary_percent"),
    _is("rotary_interleaved", bool, "Pairs are neighbours, not halves."),
    _is("use_rope_scaling", bool, "Scaled angles of Llama 3.", "model.rope_scaling"),
    _is("rope_scaling_factor", float, "Their factor.", "model.rope_scaling_factor"),
    _is("rotary_scaling_factor", float, "Factor of yarn's angles, or of Llama 3's.", "model.rope_scaling_factor"),
    _is("rotary_seq_len_interpolation_factor", int, "Divides positions.", "model.seq_len_interpolation_factor"),
    _is("rope_type", str, "Angles of multi-latent attention.", choices=("rope", "yarn")),
    _is("original_max_position_embeddings", int, "Positions before yarn."),
    _is("beta_fast", float, "Of yarn."),
    _is("beta_slow", float, "Of yarn."),
    _is("mscale", float, "Of yarn."),
    _is("mscale_all_dim", float, "Of yarn."),
    _is("no_rope_freq", list, "Layers without rotary positions."),
    _is("mrope_section", list, "Parts of rotary positions of images."),
    _is("softmax_scale", float, "Scale of attention scores."),
    _is("softmax_type", str, "Kind of attention softmax.", choices=("vanilla", "off-by-one", "learnable")),
    _is("window_size", list, "Sliding window."),
    _is("window_attn_skip_freq", list, "Layers without the window."),
    _is("attention_output_gate", bool, "A gate on what attention gives."),
    MegatronFlag(
        "use_gated_attention",
        bool,
        "model",
        "The same, in slime's scripts.",
        {"transformer.attention_output_gate": True},
    ),
    _is("apply_residual_connection_post_layernorm", bool, "Residual after the norm (BERT)."),
    _is("multi_latent_attention", bool, "Multi-latent attention (DeepSeek)."),
    _is("q_lora_rank", int, "Rank of its queries."),
    _is("kv_lora_rank", int, "Rank of its keys and values."),
    _is("qk_head_dim", int, "Width of its query and key heads without positions."),
    _is("qk_pos_emb_head_dim", int, "Width of their part with positions."),
    _is("v_head_dim", int, "Width of its value heads."),
    _is("experimental_attention_variant", str, "Linear or sparse attention."),
    _is("linear_attention_freq", list, "Layers with linear attention."),
    _is("linear_conv_kernel_dim", int, "Of linear attention."),
    _is("linear_key_head_dim", int, "Of linear attention."),
    _is("linear_value_head_dim", int, "Of linear attention."),
    _is("linear_num_key_heads", int, "Of linear attention."),
    _is("linear_num_value_heads", int, "Of linear attention."),
    _is("dsa_indexer_n_heads", int, "Of sparse attention."),
    _is("dsa_indexer_head_dim", int, "Of sparse attention."),
    _is("dsa_indexer_topk", int, "Of sparse attention."),
    _is("num_experts", int, "Experts of a layer.", "transformer.num_moe_experts"),
    _is("moe_layer_freq", list, "Layers with experts: every n-th, or a 1 or 0 a layer."),
    _is("moe_ffn_hidden_size", int, "Width of an expert."),
    _is("moe_shared_expert_intermediate_size", int, "Width of all shared experts together."),
    _is("moe_shared_expert_gate", bool, "A gate on the shared expert."),
    _is("moe_router_topk", int, "Experts a token."),
    _is("moe_router_pre_softmax", bool, "Softmax before the choice of experts."),
    _is("moe_router_score_function", str, "Scores of experts.", choices=("softmax", "sigmoid")),
    _is("moe_router_topk_scaling_factor", float, "Scale of their weights."),
    _is("moe_router_num_groups", int, "Groups of experts."),
    _is("moe_router_group_topk", int, "Groups a token."),
    _is("moe_router_enable_expert_bias", bool, "A bias in the choice of experts."),
    _is("moe_apply_probs_on_input", bool, "Weights of experts on their input."),
    _is("mtp_num_layers", int, "Layers that predict further ahead.", "bridge.layers_ahead"),
    _is("moe_latent_size", int, "Width of latent experts."),
)
