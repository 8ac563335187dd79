"""The released megatron-core on two CPU ranks: it loads what `slime convert` wrote, and `slime convert` reads what it wrote."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.bridge import Given, join
from slime_convert.folder_writing import How
from slime_core.weights.folder import read_config
from slime_core.weights.shards import Shards
from slime_megatron.convert.conversion import dist_to_hf, hf_to_dist

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="not proven: no megatron-core; pip install slime-rl[megatron]"
    ),
]

HERE = Path(__file__).parent
COMMON = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
FIELDS = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu",
    "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
MODELS = {
    "dense": ({"model_type": "qwen3"}, {"qk_layernorm": True}),
    "tied": ({"model_type": "qwen2", "tie_word_embeddings": True}, {"add_qkv_bias": True}),
    "stacked-experts": ({"model_type": "qwen3_moe", **SPARSE}, {"qk_layernorm": True, **EXPERTS, "moe_layer_freq": 1}),
    "mixed": (
        {"model_type": "qwen3_moe", **SPARSE, "mlp_only_layers": [0]},
        {"qk_layernorm": True, **EXPERTS, "moe_layer_freq": [0, 1]},
    ),
    "latent": (
        {
            "model_type": "deepseek_v3", "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 12,
            "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
            "num_key_value_heads": 4,
        },
        {
            "qk_layernorm": True, **EXPERTS, **LATENT, "moe_layer_freq": [0, 1], "num_query_groups": 4,
            "moe_shared_expert_intermediate_size": 16, "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid", "multi_latent_attention": True, "kv_channels": 8,
        },
    ),
}  # fmt: skip
LOADS = {
    "dense": [{}, {"tp": 2}, {"pp": 2}],
    "tied": [{"tp": 2}, {"pp": 2}],
    "stacked-experts": [{"tp": 2, "etp": 2}, {"ep": 2}, {"pp": 2}],
    "mixed": [{"ep": 2}, {"tp": 2, "etp": 2}],
    "latent": [{"tp": 2, "etp": 2}, {"pp": 2}, {"ep": 2}],
}
APART = {"singleton_local_shards": True}
SAVES = {
    "dense": [({"tp": 2}, None), ({"pp": 2}, None), ({"tp": 2}, APART), ({"tp": 2}, {"non_homogeneous_layers": True})],
    "tied": [({"tp": 2}, None), ({"pp": 2}, None)],
    "stacked-experts": [({"tp": 2, "etp": 2}, None), ({"ep": 2}, APART)],
    "mixed": [({"ep": 2}, None)],
    "latent": [({"tp": 2, "etp": 2}, None), ({"pp": 2}, APART)],
}
CASES = [("load", name, layout, None) for name, layouts in LOADS.items() for layout in layouts]
CASES += [("save", name, layout, metadata) for name, saves in SAVES.items() for layout, metadata in saves]


def title(number):
    do, name, layout, metadata = CASES[number]
    return f"{do}-{name}-{'-'.join(f'{k}{v}' for k, v in layout.items()) or 'alone'}{'-apart' if metadata else ''}"


def bridge_of(name):
    """The family's bridge; layers that all have experts may be stacked."""
    from slime_models.families import BRIDGES

    def find(config):
        bridge = BRIDGES[config.model_type]
        stacked = {**bridge.fields, "moe_layer_freq": Given(1)}
        return replace(bridge, fields=stacked) if name == "stacked-experts" else bridge

    return find


def write_wholes(folder, find):
    """The whole tensors of a model folder by the bridge's own functions, for the ranks to compare with."""
    config, shards = read_config(folder), Shards.open(folder)
    sizes, entries = find(config).sizes(config), find(config).entries(config)
    whole = {e.megatron: join(e, [shards[name] for name in e.hf], sizes).contiguous() for e in entries}
    save_file(whole, folder.with_suffix(".safetensors"))
    folder.with_suffix(".json").write_text(json.dumps({entry.megatron: entry.kind for entry in entries}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Model folders, and torch_dist folders made of them by us."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("dist")
    for name, (changes, _) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**COMMON, **changes}))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.normal_()
        model.save_pretrained(root / name)
        hf_to_dist(root / name, root / f"{name}-dist", bridge_of(name), How(verify=True))
        write_wholes(root / name, bridge_of(name))
    return root


@pytest.fixture(scope="module")
def ranks(place, zygote, tmp_path_factory):
    """What both ranks said of every case."""
    cases = [
        {
            "do": do, "wholes": str(place / f"{name}.safetensors"), "layout": layout, "metadata": metadata, "vocab": 128,
            "dist": str(place / f"{name}-dist" / "release" if do == "load" else place / f"saved-{number}"),
            "fields": {**FIELDS, **MODELS[name][1]}, "attention": "mla" if name == "latent" else "gqa",
            "tied": name == "tied",
        }
        for number, (do, name, layout, metadata) in enumerate(CASES)
    ]  # fmt: skip
    (place / "cases.json").write_text(json.dumps(cases))
    commands = [[HERE / "dist_rank.py", rank, place / "meeting", place / "cases.json"] for rank in (0, 1)]
    zygote.together(tmp_path_factory.mktemp("said"), commands, CUDA_DEVICE_MAX_CONNECTIONS="1")
    said = [[place / f"{n}-{rank}.txt" for rank in (0, 1)] for n in range(len(CASES))]
    return [[path.read_text() if path.exists() else "not reached" for path in both] for both in said]


@pytest.mark.parametrize("number", range(len(CASES)), ids=title)
def test_megatron_loads_our_folders_and_we_read_its(place, ranks, number):
    """Loaded: every parameter of every rank is the shard of the whole tensor. Saved: the model folder comes back."""
    assert ranks[number] == ["ok", "ok"]
    do, name, _, _ = CASES[number]
    if do == "save":
        made = place / f"back-{number}"
        dist_to_hf(place / f"saved-{number}", made, place / name, bridge_of(name), How(verify=True), trusted=True)
        first, second = Shards.open(place / name), Shards.open(made)
        assert set(first) - set(second) <= {"lm_head.weight"}
        for key in second:
            assert torch.equal(first[key], second[key]), key
