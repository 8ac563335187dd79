"""`slime convert gguf-to-hf`: a model written by gguf's own writer comes back, and each refusal says what to do."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="not proven: gguf is not installed")
pytestmark = pytest.mark.integration

TEMPLATE = "{% for m in messages %}<a>{{ m['content'] }}<c>{% endfor %}"
PIECES = ["<u>", "<a>", "<c>", "1", "2", "+", "Ġ", "12", "121"]
"""What gguf calls them: unknown, begin, end and padding; the last two are merges."""
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(PIECES), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, rope_theta=5e4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gguf_name(name):
    """A parameter of Llama in llama.cpp's words."""
    base = name.removeprefix("model.").removesuffix(".weight")
    if base.startswith("layers."):
        _, number, rest = base.split(".", 2)
        return f"blk.{number}.{NAMES[rest]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[base]


def interleaved(weight, heads):
    """Rows of q and k as llama.cpp has them: the two halves of a head's dimensions in turns."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path, model, *, quantised=False, architecture="llama", without=()):
    """The GGUF file of a model."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3] * 3 + [1] * 6)
    writer.add_token_merges(["1 2", "12 1"])
    for add, number in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.named_parameters():
        if name in without:
            continue
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name.partition("attn.")[2][:1])
        array = (interleaved(tensor, heads) if heads else tensor).detach().numpy()
        if quantised and array.ndim == 2 and not array.shape[1] % 32:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(folder):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([[1, 3, 5, 7, 4]])).logits


def test_a_file_becomes_the_model_that_was_written(cli, tmp_path):
    model = llama()
    write(tmp_path / "tiny.gguf", model)
    done = cli(
        "convert", "gguf-to-hf", "tiny.gguf", "out", "--dtype", "float32", "--verify", "--max-shard-size", "40KB"
    )
    assert (done.code, done.out) == (0, f"{tmp_path / 'out'}\n"), done.err
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), model(torch.tensor([[1, 3, 5, 7, 4]])).logits)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["eos_token_id"], config["tie_word_embeddings"]) == (
        ["LlamaForCausalLM"], 2, True,
    )  # fmt: skip
    assert not {"quantization_config", "_name_or_path"} & set(config)


def test_the_tokenizer_has_the_files_special_tokens_and_its_chat_template(cli, tmp_path):
    write(tmp_path / "tiny.gguf", llama())
    assert cli("convert", "gguf-to-hf", "tiny.gguf", "out").code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    special = (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<u>", "<a>", "<c>", "<c>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12+1"}], tokenize=False)
    assert tokenizer.encode(text, add_special_tokens=False) == [1, 7, 5, 3, 2]
    stated = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert stated == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_quantised_weights_are_those_that_gguf_reads_back_in_bfloat16(cli, tmp_path):
    model = llama()
    write(tmp_path / "tiny.gguf", model, quantised=True)
    assert cli("convert", "gguf-to-hf", "tiny.gguf", "out", "--quiet").code == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q4_1
    meant = gguf.quants.dequantize(gguf.quants.quantize(model.get_parameter(name).detach().numpy(), kind), kind)
    assert torch.equal(stored[name], torch.tensor(meant).bfloat16())
    assert not torch.equal(stored[name].float(), model.get_parameter(name))


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("nothing.gguf", 2, "CFG05"),
        ("text.gguf", 3, "TOK47"),
        ("cut.gguf", 3, "TOK47"),
        ("unknown.gguf", 2, "CFG200"),
        ("lacking.gguf", 3, "TOK46"),
    ],
)
def test_each_refusal_says_what_is_wrong_and_leaves_nothing(cli, tmp_path, source, code, said):
    model = llama()
    content = write(tmp_path / "content.gguf", model).read_bytes()
    (tmp_path / "text.gguf").write_text("not a model" * 99)
    (tmp_path / "cut.gguf").write_bytes(content[:-999])
    write(tmp_path / "unknown.gguf", model, architecture="clip")
    write(tmp_path / "lacking.gguf", model, without=("model.layers.1.mlp.up_proj.weight",))
    done = cli("convert", "gguf-to-hf", source, "out")
    assert (done.code, said in done.err, source in done.err) == (code, True, True), done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_stays(cli, tmp_path):
    write(tmp_path / "tiny.gguf", llama())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    done = cli("convert", "gguf-to-hf", "tiny.gguf", "out")
    assert (done.code, "CFG12" in done.err, "--force" in done.err) == (2, True, True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_missing_package_is_named_with_its_installation(cli, tmp_path, monkeypatch):
    write(tmp_path / "tiny.gguf", llama())
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    done = cli("convert", "gguf-to-hf", "tiny.gguf", "out")
    assert (done.code, "CFG04" in done.err) == (2, True)
    assert "fix: pip install gguf" in done.err
