"""Models of DeepSeek V3's kind: latent attention, dense layers first, then routed and shared experts.

transformers turns the rotary rows of a head in pairs (``rope_interleave``, as DeepSeek stores them), and so does
megatron-core's latent attention: those rows travel as they are. Where a folder stores two halves, the kinds
``rope_heads`` and ``rope_tail`` bring them into pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slime_convert.bridge import Bridge, BridgeRow, Given, Kind, refused
from slime_models.fields import DECODER, ONLY, rope
from slime_models.routing import DEEPSEEK_EXPERTS
from slime_models.rows import AHEAD, ENDS, EXPERT_BIAS, EXPERTS, MLP, NORMS, OF, ROUTER, SHARED_EXPERTS, TO

ATTENTION = f"{TO}.self_attention"
HF_ATTENTION = f"{OF}.self_attn"


def rope_type(config: Any) -> str:
    """``rope`` or ``yarn``.

    Raises:
        DataError: TOK200 another scaling, or yarn with a magnitude that megatron-core works out in another way.
    """
    parameters = rope(config)
    kind = parameters["rope_type"]
    if kind == "default":
        return "rope"
    if kind != "yarn":
        raise refused(config.model_type, "rope_type", kind, "rotary angles are 'default' or 'yarn'")
    if parameters.get("attention_factor") is not None:
        reason = "megatron-core works it out of factor, mscale and mscale_all_dim"
        raise refused(config.model_type, "attention_factor", parameters["attention_factor"], reason)
    if not parameters.get("truncate", True):
        raise refused(config.model_type, "truncate", False, "megatron-core rounds yarn's bounds to whole rows")
    if parameters.get("mscale_all_dim") and not parameters.get("mscale"):
        raise refused(
            config.model_type, "mscale", parameters.get("mscale"), "mscale_all_dim is set, so it must be set too"
        )
    return "yarn"


def yarn(name: str, default: float) -> Callable[[Any], float]:
    """A reader of one of yarn's numbers; ``default`` without yarn, or where it is not set."""

    def read(config: Any) -> float:
        parameters = rope(config)
        return float(parameters.get(name) or default) if parameters["rope_type"] == "yarn" else default

    read.__name__ = f"{name}_of_yarn"
    return read


def magnitude(config: Any) -> float:
    """Yarn's ``mscale``, which transformers reads only beside ``mscale_all_dim``; else 1."""
    return yarn("mscale", 1.0)(config) if rope(config).get("mscale_all_dim") else 1.0


def stretch(config: Any) -> float:
    """Yarn's ``factor``; where it is not set, the ratio of the two lengths. 1 without yarn."""
    parameters = rope(config)
    if parameters["rope_type"] != "yarn":
        return 1.0
    return float(parameters.get("factor") or config.max_position_embeddings / trained_length(config))


def trained_length(config: Any) -> int:
    """Positions before yarn stretched them."""
    return int(rope(config).get("original_max_position_embeddings") or config.max_position_embeddings)


def rotary(megatron: str, hf: str, halves: Kind, *, shape: str, when: str = "") -> tuple[BridgeRow, BridgeRow]:
    """A row for pairs, as both sides store them, and one for a folder with two halves."""
    first = f"{when} and " if when else ""
    names = (f"{ATTENTION}.{megatron}.weight", (f"{HF_ATTENTION}.{hf}.weight",))
    return (
        BridgeRow(*names, "rows", when=f"{first}rope_interleave", shape=shape),
        BridgeRow(*names, halves, when=f"{first}not rope_interleave", shape=shape),
    )


DEEPSEEK_V3 = Bridge(
    family="deepseek_v3",
    attention="mla",
    ahead=AHEAD,
    rows=(
        *ENDS,
        *NORMS,
        *rotary("linear_q_proj", "q_proj", "rope_heads", shape="q hidden", when="not q_lora_rank"),
        BridgeRow(
            f"{ATTENTION}.linear_q_down_proj.weight",
            (f"{HF_ATTENTION}.q_a_proj.weight",),
            "rows",
            when="q_lora_rank",
            shape="q_low hidden",
        ),
        BridgeRow(
            f"{ATTENTION}.q_layernorm.weight",
            (f"{HF_ATTENTION}.q_a_layernorm.weight",),
            when="q_lora_rank",
            shape="q_low",
        ),
        *rotary("linear_q_up_proj", "q_b_proj", "rope_heads", shape="q q_low", when="q_lora_rank"),
        *rotary("linear_kv_down_proj", "kv_a_proj_with_mqa", "rope_tail", shape="kv_down hidden"),
        BridgeRow(f"{ATTENTION}.kv_layernorm.weight", (f"{HF_ATTENTION}.kv_a_layernorm.weight",), shape="kv_low"),
        BridgeRow(
            f"{ATTENTION}.linear_kv_up_proj.weight", (f"{HF_ATTENTION}.kv_b_proj.weight",), "rows", shape="kv kv_low"
        ),
        BridgeRow(
            f"{ATTENTION}.linear_proj.weight", (f"{HF_ATTENTION}.o_proj.weight",), "columns", shape="hidden value"
        ),
        *MLP,
        ROUTER,
        EXPERT_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
    ),
    fields={
        **DECODER,
        **DEEPSEEK_EXPERTS,
        "multi_latent_attention": Given(True),
        "num_query_groups": "num_attention_heads",
        "kv_channels": "qk_nope_head_dim",
        "qk_layernorm": Given(True),
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "rope_type": rope_type,
        "rotary_scaling_factor": stretch,
        "original_max_position_embeddings": trained_length,
        "beta_fast": yarn("beta_fast", 32.0),
        "beta_slow": yarn("beta_slow", 1.0),
        "mscale": magnitude,
        "mscale_all_dim": yarn("mscale_all_dim", 0.0),
    },
    defaults={"q_lora_rank": None, "rope_interleave": True, "routed_scaling_factor": 1.0},
    only={
        **ONLY,
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
)


def typed_layers(config: Any) -> list[int]:
    """1 a layer of experts, by ``mlp_layer_types``; all but the first where the config is silent."""
    kinds = getattr(config, "mlp_layer_types", None) or ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)
    return [int(kind == "sparse") for kind in kinds]


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    family="glm4_moe_lite",
    fields={**DEEPSEEK_V3.fields, "moe_layer_freq": typed_layers},
)
"""GLM-4.7-Flash: DeepSeek V3's kind, with its layers of experts listed."""
