"""A small config of every family of models that is tested, with what is its own: windows, soft caps, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.testing.models import VOCAB, char_tokenizer

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}
_WINDOW = {"sliding_window": 24}
_GEMMA = _GROUPED | _WINDOW | {"initializer_range": 0.05}  # embeddings are scaled by 8
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # instead of yarn for 131,072 positions
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON | {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": ("MistralConfig", _GROUPED | _WINDOW),
    "qwen2": ("Qwen2Config", _COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _GROUPED),
    "qwen3-moe": ("Qwen3MoeConfig", _GROUPED | _EXPERTS | {"num_experts": 4}),
    "qwen3-next": (
        "Qwen3NextConfig",
        _GROUPED | _LINEAR | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "gemma2": ("Gemma2Config", _GEMMA | {"query_pre_attn_scalar": 24} | _CAPS),
    "gemma3": ("Gemma3TextConfig", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", _COMMON | _WINDOW | {"num_key_value_heads": 2, "partial_rotary_factor": 0.75}),
    "olmo2": ("Olmo2Config", _COMMON | {"num_key_value_heads": 2}),
    "glm4": ("Glm4Config", _GROUPED | {"attention_bias": True}),
    "glm4-moe": ("Glm4MoeConfig", _GROUPED | _ROUTED | {"attention_bias": True, "use_qk_norm": True}),
    "smollm3": ("SmolLM3Config", _COMMON | {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
    "deepseek-v2": ("DeepseekV2Config", _COMMON | _ROUTED | _LATENT | {"num_key_value_heads": 4}),
    "minimax-m2": (
        "MiniMaxM2Config",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "partial_rotary_factor": 0.5},
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "neox": ("GPTNeoXConfig", _COMMON),
    "gpt-oss": (
        "GptOssConfig",
        _GROUPED | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
    ),
}
"""Class of the config and its values, by name; Phi-4 is ``phi3``."""
RECURRENT = ("qwen3-next",)
"""Families with a state that goes over the borders of a pack: they run one sequence a row."""


def family_config(name: str, vocab_size: int, **changes: Any) -> Any:
    """The transformers config of a family of :data:`FAMILIES`, whose end token is id 1 and whose padding is id 0."""
    import transformers

    kind, values = FAMILIES[name]
    ids = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return getattr(transformers, kind)(**(ids | values | changes))


def family_model(path: Path, name: str, *, seed: int = 0, vocab: str = VOCAB, **changes: Any) -> Path:
    """Write a model folder of a family of :data:`FAMILIES` with weights drawn from ``seed``; ``path`` again.

    Example:
        folder = ModelFolder.open(family_model(tmp_path / "model", "gemma2"))
    """
    from transformers import AutoModelForCausalLM

    from slime_core.weights.build import draw

    tokenizer = char_tokenizer(vocab)
    tokenizer.save_pretrained(str(path))
    model: Any = AutoModelForCausalLM.from_config(family_config(name, **({"vocab_size": len(tokenizer)} | changes)))
    draw(model, seed)
    model.save_pretrained(str(path))
    return path
