"""The released megatron-core on two CPU ranks: it loads what `slime convert` wrote, and `slime convert` reads what it wrote."""

import json
import multiprocessing
import sys
import traceback
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import answer, run_ranks
from safetensors.torch import load_file, save_file

from slime_convert.bridge import Entry, Given, join, shard
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
    "dense": [{"tp": 2}],
    "tied": [{"tp": 2}, {"pp": 2}],
    "stacked-experts": [{"tp": 2, "etp": 2}],
    "mixed": [{"ep": 2}],
    "latent": [{"tp": 2, "etp": 2}, {"pp": 2}],
}
APART = {"singleton_local_shards": True}
SAVES = {
    "dense": [({"tp": 2}, APART), ({"tp": 2}, {"non_homogeneous_layers": True})],
    "tied": [({"pp": 2}, None)],
    "stacked-experts": [({"tp": 2, "etp": 2}, None)],
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
    results = run_ranks(
        zygote, tmp_path_factory.mktemp("said"), load_and_save, 2, place, cases, CUDA_DEVICE_MAX_CONNECTIONS="1"
    )
    return [
        [result[number] if number < len(result) else "not reached" for result in results]
        for number in range(len(cases))
    ]


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


def load_and_save(rank, root, cases):
    """What this rank says of each case, one after another, in one process group; it ends with the first that fails."""
    sys.modules["__main__"].__file__ = None  # or megatron-core's process for a queue would import this file, and torch
    dist.init_process_group("gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=2)
    results = []
    for case in cases:
        try:
            case["fields"]["activation_func"] = getattr(torch.nn.functional, case["fields"]["activation_func"])
            run(case)
            results.append("ok")
        except Exception:
            results.append(traceback.format_exc())
            break
    for child in multiprocessing.active_children():  # megatron-core's, that wait for files to write
        child.terminate()
        child.join()
    return results


class NoAttention(torch.nn.Module):
    """Holds nothing and is never called."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def model_of(case):
    """The released GPTModel with the local layer spec, this rank's stage of it."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention as latent

    fields, layout = dict(case["fields"]), case["layout"]
    kind = MLATransformerConfig if case["attention"] == "mla" else TransformerConfig
    config = kind(
        **fields,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        pipeline_dtype=torch.float32,
        hetereogenous_dist_checkpoint=case.get("apart", False),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    latent.HAVE_TE = False  # it says True where Transformer Engine is not installed, and fails then
    for layer in spec.layer_specs if case["attention"] == "mla" else ():  # the local one does not build there
        layer.submodules.self_attention.submodules.core_attention = NoAttention
    return GPTModel(
        config,
        spec,
        vocab_size=case["vocab"],
        max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type="rope",
    )


def wholes(case):
    """Every whole tensor of the model, as the bridge's `join` made it, with its entry."""
    kinds = json.loads(Path(case["wholes"]).with_suffix(".json").read_text())
    whole = {name: (Entry(name, (), kinds[name]), tensor) for name, tensor in load_file(case["wholes"]).items()}
    if case["tied"]:
        whole["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    return whole


def shards(model, case):
    """This rank's parameters with what each must hold: (name, parameter, the shard of the whole tensor)."""
    from megatron.core import parallel_state as state

    known, layout = wholes(case), case["layout"]
    tensor = state.get_tensor_model_parallel_rank(), layout.get("tp", 1)
    expert = state.get_expert_tensor_parallel_rank(), layout.get("etp", 1)
    stage = model.decoder.layers[0].layer_number - 1
    for name, held in model.state_dict(keep_vars=True).items():
        if held is None or name.endswith("_extra_state"):
            continue
        words = name.split(".")
        if "layers" in words:
            words[words.index("layers") + 1] = str(int(words[words.index("layers") + 1]) + stage)
        if "local_experts" in words:
            place, many = words.index("local_experts") + 1, case["fields"]["num_moe_experts"] // layout.get("ep", 1)
            words[place] = str(int(words[place]) + many * state.get_expert_model_parallel_rank())
        entry, whole = known[".".join(words)]
        rows = case["vocab"] - len(whole)
        if entry.kind == "vocabulary":
            whole = torch.cat([whole, whole.new_zeros(rows, whole.shape[1])])
        yield name, held, shard(entry, whole, *(expert if ".local_experts." in name else tensor))


def run(case):
    """Load and compare, or fill and save."""
    from megatron.core import dist_checkpointing, parallel_state as state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    layout = case["layout"]
    state.initialize_model_parallel(
        layout.get("tp", 1),
        layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    model_parallel_cuda_manual_seed(1)
    model = model_of(case)
    folder, metadata = case["dist"], case.get("metadata")
    if case["do"] == "load":
        found = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, folder)
        model.load_state_dict(found["model"], strict=True)
        for name, tensor, meant in shards(model, case):
            assert torch.equal(tensor, meant.to(tensor.dtype)), f"{name}: {list(tensor.shape)}, {list(meant.shape)}"
    else:
        with torch.no_grad():
            for _, tensor, meant in shards(model, case):
                tensor.copy_(meant)
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), folder)
    state.destroy_model_parallel()


if __name__ == "__main__":
    answer(load_and_save)
