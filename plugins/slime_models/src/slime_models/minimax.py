"""MiniMax-M2: experts in every layer and none shared, norms of all heads together, part of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from slime_convert.bridge import Bridge, BridgeRow, Given
from slime_models.fields import DECODER, ONLY, no_scaling, rotated_part
from slime_models.routing import normed_sigmoid, sparse_layers
from slime_models.rows import ATTENTION, ENDS, EXPERTS, NORMS, OF, ROUTER, TO

MOE = f"{OF}.block_sparse_moe"
UP, DOWN = EXPERTS

MINIMAX_M2 = Bridge(
    family="minimax_m2",
    rows=(
        *ENDS,
        *NORMS,
        *ATTENTION,
        BridgeRow(f"{TO}.self_attention.q_norm.weight", (f"{OF}.self_attn.q_norm.weight",), "rows", shape="q"),
        BridgeRow(f"{TO}.self_attention.k_norm.weight", (f"{OF}.self_attn.k_norm.weight",), "rows", shape="kv"),
        replace(ROUTER, hf=(f"{MOE}.gate.weight",)),
        BridgeRow(f"{TO}.mlp.router.expert_bias", (f"{MOE}.e_score_correction_bias",), on="moe", shape="experts"),
        replace(UP, hf=(f"{MOE}.experts.{{expert}}.w1.weight", f"{MOE}.experts.{{expert}}.w3.weight")),
        replace(DOWN, hf=(f"{MOE}.experts.{{expert}}.w2.weight",)),
    ),
    fields={
        **DECODER,
        "qk_layernorm": Given(True),
        "rotary_percent": rotated_part(1.0),
        "rope_scaling": no_scaling,
        "num_moe_experts": "num_local_experts",
        "moe_layer_freq": sparse_layers,
        "moe_ffn_hidden_size": "intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
        "moe_router_score_function": normed_sigmoid,
        "moe_router_enable_expert_bias": Given(True),
        "moe_router_bias_update_rate": Given(0.0),  # the bias is the folder's, and stays
        "moe_router_dtype": Given("fp32"),
    },
    wide_qk_norms=True,
    only={
        **ONLY,
        "attention_bias": (False,),
        "router_jitter_noise": (0.0,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
    },
)
