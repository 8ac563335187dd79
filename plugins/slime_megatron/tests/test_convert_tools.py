"""slime's conversion tools by their names and flags: doors to `slime convert`."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

TOOLS = Path(__file__).parents[3] / "tools"
MODEL_ARGS = (
    *("--swiglu", "--num-layers", "2", "--hidden-size", "16", "--ffn-hidden-size", "32", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "4", "--qk-layernorm"),
    *(
        "--use-rotary-position-embeddings",
        "--disable-bias-linear",
        "--normalization",
        "RMSNorm",
        "--norm-epsilon",
        "1e-6",
    ),
    *("--rotary-base", "10000", "--untie-embeddings-and-output-weights"),
)


def tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return str(tiny_model(tmp_path / "hf", hidden=16, layers=2))


def test_a_model_goes_there_and_back_by_slimes_flags(hf, tmp_path, capsys):
    there = tool("convert_hf_to_torch_dist").main
    assert there([*MODEL_ARGS, "--hf-checkpoint", hf, "--save", "dist", "--quiet"]) == 0
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = tool("convert_torch_dist_to_hf").main
    words = ["--input-dir", "dist/release", "--output-dir", "back", "--origin-hf-dir", hf, "--vocab-size", "99"]
    assert back([*words, "--chunk-size", "4000", "--model-name", "qwen3"]) == 0
    assert "--vocab-size is not needed" in capsys.readouterr().err
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert back(words) == 2
    assert back([*words, "-f"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-layers", "36"), "36"),
        (("--rotary-base", "1000000"), "1000000"),
        (("--num-layerz", "2"), "num_layerz"),
        (("stray",), "stray"),
        (("--no-qk-layernorm",), "--qk-layernorm false disagrees"),
        (("--norm-epsilon=1e-5",), "--norm-epsilon 1e-05 disagrees"),
        (("--num-layers",), "--num-layers needs a value"),
        (("--lr", "1e-6"), "--lr describes no model"),
    ],
    ids=["layers", "rotary base", "unknown", "stray", "negated", "equals", "no value", "of a run"],
)
def test_a_flag_that_describes_another_model_is_named(hf, tmp_path, capsys, flags, said):
    words = [*flags, "--hf-checkpoint", hf, "--save", "dist"]
    assert tool("convert_hf_to_torch_dist").main(words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    "freq",
    [("[1]*2",), ("[1,1]",), ("[1, 1]",), ("[0]*0+[1]*2",), ("1",), ("1", "1")],
    ids=lambda words: " ".join(words),
)
def test_layers_with_experts_are_written_as_in_slimes_scripts(tmp_path, monkeypatch, capsys, freq):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    config = Qwen3MoeConfig(vocab_size=32, intermediate_size=16, **sizes, **sparse)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    main = tool("convert_hf_to_torch_dist").main
    words = ["--num-experts", "4", "--moe-router-topk", "2", "--hf-checkpoint", "hf", "--quiet"]
    assert main(["--moe-layer-freq", *freq, *words, "--save", "dist"]) == 0, capsys.readouterr().err
    assert main(["--moe-layer-freq", "[0]*1+[1]*1", *words, "--save", "other"]) == 2
    assert "--moe-layer-freq" in capsys.readouterr().err


def test_under_torchrun_one_process_does_it(hf, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert tool("convert_hf_to_torch_dist").main(["--hf-checkpoint", hf, "--save", "dist"]) == 0
    assert not (tmp_path / "dist").exists()


def test_the_way_back_needs_a_folder_of_origin(hf, capsys):
    assert tool("convert_torch_dist_to_hf").main(["--input-dir", "dist", "--output-dir", "x"]) == 2
    assert "--origin-hf-dir" in capsys.readouterr().err
