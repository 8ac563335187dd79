"""A small family with its bridge, and folders of it: what the tests of conversion are made on. Not a test."""

import json

import torch
from safetensors.torch import load_file, save_file

from slime_convert.bridge import Bridge, BridgeRow, Given
from slime_convert.folder_writing import How
from slime_megatron.convert.conversion import dist_to_hf, hf_to_dist

LAYER, OF = "decoder.layers.{layer}", "model.layers.{layer}"
ROWS = (
    BridgeRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary", shape="vocab hidden"),
    BridgeRow("decoder.final_layernorm.weight", ("model.norm.weight",), shape="hidden"),
    BridgeRow("output_layer.weight", ("lm_head.weight",), "vocabulary", when="not tie_word_embeddings",
              shape="vocab hidden"),
    BridgeRow(f"{LAYER}.input_layernorm.weight", (f"{OF}.input_layernorm.weight",), shape="hidden"),
    BridgeRow(f"{LAYER}.pre_mlp_layernorm.weight", (f"{OF}.post_attention_layernorm.weight",), shape="hidden"),
    BridgeRow(f"{LAYER}.self_attention.linear_qkv.weight", tuple(f"{OF}.self_attn.{n}_proj.weight" for n in "qkv"),
              "qkv", shape="q hidden, kv hidden, kv hidden"),
    BridgeRow(f"{LAYER}.self_attention.linear_proj.weight", (f"{OF}.self_attn.o_proj.weight",), "columns",
              shape="hidden q"),
    BridgeRow(f"{LAYER}.mlp.linear_fc1.weight", (f"{OF}.mlp.gate_proj.weight", f"{OF}.mlp.up_proj.weight"), "gate_up",
              shape="ffn hidden"),
    BridgeRow(f"{LAYER}.mlp.linear_fc2.weight", (f"{OF}.mlp.down_proj.weight",), "columns", shape="hidden ffn"),
)  # fmt: skip
FIELDS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
    "gated_linear_unit": Given(True),
}  # fmt: skip
BRIDGE = Bridge(family="llama", rows=ROWS, fields=FIELDS)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def bridge_of(config):
    """The bridge, whatever the config."""
    return BRIDGE


def tensors_of(dtype=torch.bfloat16, **changes):
    """Random tensors of a folder, from a seed."""
    config = CONFIG | changes
    hidden, ffn, q = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * 4
    kv, vocab = config["num_key_value_heads"] * 4, config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden), f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden), f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_folder(path, tensors=None, **changes):
    """A model folder: config, safetensors, a file that stands for a tokenizer."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "tokenizer.json").write_text('{"model": {}}')
    save_file(
        tensors_of(**changes) if tensors is None else tensors, path / "model.safetensors", metadata={"format": "pt"}
    )
    return path


def to_dist(source, target, *, divisible_by=128, **how):
    """A torch_dist folder of a model folder, compared with it."""
    chosen = How(verify=how.pop("verify", True), **how)
    return hf_to_dist(source, target, bridge_of, chosen, divisible_by=divisible_by)


def back(dist, target, origin, *, trusted=False, **how):
    """A model folder of a torch_dist folder; its tensors by name."""
    dist_to_hf(dist, target, origin, bridge_of, How(verify=True, **how), trusted=trusted)
    return {name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one, other):
    """Fail unless tensors are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name
