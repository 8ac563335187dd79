"""Rows that families share: embedding, attention, dense MLP and experts, as every model of Llama's descent names them.

    Row(Megatron's name, (Hugging Face's names,), kind, shape of each Hugging Face tensor)

`slime_convert.bridge` says what the kinds and the words of a shape mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from slime_convert.bridge import BridgeRow

TO = "decoder.layers.{layer}"  # Megatron's layer
OF = "model.layers.{layer}"  # Hugging Face's

ENDS = (
    BridgeRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary", shape="vocab hidden"),
    BridgeRow("decoder.final_layernorm.weight", ("model.norm.weight",), shape="hidden"),
    BridgeRow(
        "output_layer.weight",
        ("lm_head.weight",),
        "vocabulary",
        when="not tie_word_embeddings",
        shape="vocab hidden",
    ),
)

NORMS = (
    BridgeRow(f"{TO}.input_layernorm.weight", (f"{OF}.input_layernorm.weight",), shape="hidden"),
    BridgeRow(f"{TO}.pre_mlp_layernorm.weight", (f"{OF}.post_attention_layernorm.weight",), shape="hidden"),
)

ATTENTION = (
    BridgeRow(
        f"{TO}.self_attention.linear_qkv.weight",
        (f"{OF}.self_attn.q_proj.weight", f"{OF}.self_attn.k_proj.weight", f"{OF}.self_attn.v_proj.weight"),
        "qkv",
        shape="q hidden, kv hidden, kv hidden",
    ),
    BridgeRow(
        f"{TO}.self_attention.linear_proj.weight", (f"{OF}.self_attn.o_proj.weight",), "columns", shape="hidden q"
    ),
)

QKV_BIAS = BridgeRow(
    f"{TO}.self_attention.linear_qkv.bias",
    (f"{OF}.self_attn.q_proj.bias", f"{OF}.self_attn.k_proj.bias", f"{OF}.self_attn.v_proj.bias"),
    "qkv",
    shape="q, kv, kv",
)

QK_NORMS = (
    BridgeRow(f"{TO}.self_attention.q_layernorm.weight", (f"{OF}.self_attn.q_norm.weight",), shape="head"),
    BridgeRow(f"{TO}.self_attention.k_layernorm.weight", (f"{OF}.self_attn.k_norm.weight",), shape="head"),
)

MLP = (
    BridgeRow(
        f"{TO}.mlp.linear_fc1.weight",
        (f"{OF}.mlp.gate_proj.weight", f"{OF}.mlp.up_proj.weight"),
        "gate_up",
        on="dense",
        shape="ffn hidden",
    ),
    BridgeRow(
        f"{TO}.mlp.linear_fc2.weight", (f"{OF}.mlp.down_proj.weight",), "columns", on="dense", shape="hidden ffn"
    ),
)

ROUTER = BridgeRow(f"{TO}.mlp.router.weight", (f"{OF}.mlp.gate.weight",), on="moe", shape="experts hidden")

EXPERT_BIAS = BridgeRow(
    f"{TO}.mlp.router.expert_bias", (f"{OF}.mlp.gate.e_score_correction_bias",), on="moe", shape="experts"
)

EXPERTS = (
    BridgeRow(
        f"{TO}.mlp.experts.local_experts.{{expert}}.linear_fc1.weight",
        (f"{OF}.mlp.experts.{{expert}}.gate_proj.weight", f"{OF}.mlp.experts.{{expert}}.up_proj.weight"),
        "gate_up",
        on="moe",
        shape="expert hidden",
    ),
    BridgeRow(
        f"{TO}.mlp.experts.local_experts.{{expert}}.linear_fc2.weight",
        (f"{OF}.mlp.experts.{{expert}}.down_proj.weight",),
        "columns",
        on="moe",
        shape="hidden expert",
    ),
)

SHARED_EXPERTS = (
    BridgeRow(
        f"{TO}.mlp.shared_experts.linear_fc1.weight",
        (f"{OF}.mlp.shared_experts.gate_proj.weight", f"{OF}.mlp.shared_experts.up_proj.weight"),
        "gate_up",
        on="moe",
        shape="shared hidden",
    ),
    BridgeRow(
        f"{TO}.mlp.shared_experts.linear_fc2.weight",
        (f"{OF}.mlp.shared_experts.down_proj.weight",),
        "columns",
        on="moe",
        shape="hidden shared",
    ),
)

AHEAD = (
    BridgeRow("mtp.layers.{ahead}.enorm.weight", (f"{OF}.enorm.weight",), shape="hidden"),
    BridgeRow("mtp.layers.{ahead}.hnorm.weight", (f"{OF}.hnorm.weight",), shape="hidden"),
    BridgeRow("mtp.layers.{ahead}.eh_proj.weight", (f"{OF}.eh_proj.weight",), "rows", shape="hidden hidden_twice"),
    BridgeRow("mtp.layers.{ahead}.final_layernorm.weight", (f"{OF}.shared_head.norm.weight",), shape="hidden"),
)
"""Of a layer that predicts further ahead, as DeepSeek V3 names it."""


def in_language_model(rows: Sequence[BridgeRow]) -> tuple[BridgeRow, ...]:
    """The rows as a folder with layers for pictures names them."""
    return tuple(
        replace(row, hf=tuple(re.sub(r"^model\.", "model.language_model.", name) for name in row.hf)) for row in rows
    )
