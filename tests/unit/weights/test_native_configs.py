"""Published folders that name code of their own load as transformers' layers, and that code is never run."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.testing.models import char_tokenizer
from slime_core.weights.folder import ModelFolder
from slime_core.weights.prediction_layers import FILE, carry

pytestmark = pytest.mark.unit

COMMON = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"hidden_act": "silu", "eos_token_id": 1, "max_position_embeddings": 256, "tie_word_embeddings": False},
}
YARN = {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}
PUBLISHED = {
    "kimi_k2": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        **{"moe_intermediate_size": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
        **{"num_key_value_heads": 4, "num_nextn_predict_layers": 0, "rope_theta": 50000.0},
        "rope_scaling": YARN | {"original_max_position_embeddings": 64},
    },
    "mimo": {"num_key_value_heads": 2, "head_dim": 4, "rope_theta": 640000, "num_nextn_predict_layers": 1},
    "minimax_m2": {
        **{"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"rotary_dim": 4, "rope_theta": 5000000, "use_qk_norm": True, "scoring_func": "sigmoid"},
    },
}
"""What config.json says in the words of the publisher."""
LAYERS = {  # the same in the words of transformers
    "kimi_k2": {"model_type": "deepseek_v3"},
    "mimo": {"model_type": "qwen2"},
    "minimax_m2": {"model_type": "minimax_m2", "partial_rotary_factor": 0.5},
}
BESIDE = {
    "kimi_k2": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "mimo": "model.mtp_layers.0.input_proj.weight",
    "minimax_m2": "model.layers.1.self_attn.rotary_emb.inv_freq",
}
"""A tensor that no layer of transformers has."""


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path):
    """The family, a model of it, and its folder as published: code in config.json, and a tensor more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = char_tokenizer()
    values = {**COMMON, **PUBLISHED[request.param], "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**values, **LAYERS[request.param])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    values |= {"model_type": request.param, "architectures": ["Theirs"], "auto_map": code, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), BESIDE[request.param]: torch.ones(2)}, file, metadata={"format": "pt"})
    return request.param, model, tmp_path


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("tokenizer", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_a_published_folder_has_the_logits_of_transformers_own_layers_without_its_code(published, tokenizer, trust):
    _, model, path = published
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": tokenizer}))
    folder = ModelFolder.open(path, trust_remote_code=trust)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(folder.build_model()(tokens).logits, model(tokens).logits)
    assert folder.config.name_or_path == str(path)
    assert not (path / "ran").exists()


def test_only_layers_that_predict_further_ahead_are_carried_to_a_folder_that_training_writes(published, tmp_path):
    family, model, path = published
    folder = ModelFolder.open(path)
    final = tmp_path / "final"
    model.save_pretrained(final)
    carry(path, final, folder.config)
    written = load_file(final / FILE) if (final / FILE).exists() else {}
    assert set(written) == ({BESIDE[family]} if family == "mimo" else set())
