"""A small random model of each family, saved as transformers saves it: what the bridges are held against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_convert.bridge import Bridge, Entry, Sizes
from slime_core.weights.shards import Shards
from slime_models.families import BRIDGES

COMMON = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 16384, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}  # fmt: skip
GATED = {**EXPERTS, "shared_expert_intermediate_size": 24}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 8, "head_dim": 8,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": SCALED},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "head_dim": 4, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2},
    "qwen3_moe-mixed": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_next": {"model_type": "qwen3_next", **LINEAR, **GATED, "mlp_only_layers": [1]},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **LINEAR, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **LINEAR, **GATED},
    "glm4": {"model_type": "glm4"},
    "glm4-unbiased": {"model_type": "glm4", "attention_bias": False},
    "glm4_moe": {"model_type": "glm4_moe", **ROUTED, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe-plain": {"model_type": "glm4_moe", **ROUTED, "routed_scaling_factor": 2.5},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "rope_parameters": YARN},
    "deepseek_v3-halves": {"model_type": "deepseek_v3", **LATENT, "rope_interleave": False},
    "deepseek_v3-direct": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "rope_interleave": False},
}


@dataclass(frozen=True)
class Small:
    """A folder, its config as transformers reads it, and its bridge with all that follows from the two."""

    folder: Path
    config: Any
    bridge: Bridge
    sizes: Sizes
    entries: list[Entry]
    shards: Shards


def make(name: str, folder: Path) -> Small:
    """Draw, save and read back the variant of that name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **VARIANTS[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    bridge = BRIDGES[config.model_type]
    return Small(folder, config, bridge, bridge.sizes(config, 8), bridge.entries(config), Shards.open(folder))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Small]:
    """All variants, by name."""
    return {name: make(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


@pytest.fixture(params=VARIANTS)
def small(request: pytest.FixtureRequest, models: dict[str, Small]) -> Small:
    """Each variant in turn."""
    return models[request.param]
