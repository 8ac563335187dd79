"""Adapters merged into model folders, against the layers' own merge and against peft's."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config, Qwen3MoeConfig

from slime_convert.adapter_to_hf import adapter_to_hf
from slime_convert.folder_writing import How
from slime_core.errors import ConfigError, DataError
from slime_core.lora.folder import factors_of, write_adapter
from slime_core.lora.layers import attach
from slime_core.lora.spec import LoraSpec

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore")]  # of what peft imports

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "dense": (Qwen3Config(**SHAPE, tie_word_embeddings=True), LoraSpec(rank=5)),
    "dora": (Qwen3Config(**SHAPE), LoraSpec(rank=5, target_modules=("q_proj", "down_proj"), use_dora=True)),
    "experts": (Qwen3MoeConfig(**SHAPE, **EXPERTS), LoraSpec(rank=5, use_rslora=True)),
    "experts of in by out": (GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2), LoraSpec(rank=5)),
}


@torch.no_grad()
def adapted(folder, config, spec, dtype):
    """A base in ``folder``/base, an adapter of it in ``folder``/adapter, and the model with it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(str(folder / "base"))
    adapters = attach(model, spec, seed=0)
    factors = factors_of(adapters, "default")
    for one in factors.values():
        one.b.normal_(std=0.1)
        if one.magnitude is not None:
            one.magnitude.mul_(1.25)
    write_adapter(folder / "adapter", adapters.spec.to_peft(str(folder / "base")), factors)
    return model, adapters


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("config", "spec"), CASES.values(), ids=CASES)
def test_a_merged_folder_has_the_bits_of_the_layers_merge(config, spec, dtype, tmp_path):
    _, adapters = adapted(tmp_path, config, spec, dtype)
    done = adapter_to_hf(tmp_path / "adapter", tmp_path / "merged", None, How(verify=True, shard=20_000))
    assert done.files > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.dtype == dtype
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, tensor in model.state_dict().items():
        module, key = adapters.weights().get(name, (None, ""))
        want = base[name] if module is None else module.merged(key, "default", dtype)
        assert torch.equal(tensor, want), name
        assert module is None or not torch.equal(tensor, base[name])


@torch.no_grad()
def test_peft_merges_the_same_weights(tmp_path):
    from peft import PeftModel

    adapted(tmp_path, *CASES["dora"], torch.float32)
    adapter_to_hf(tmp_path / "adapter", tmp_path / "merged", tmp_path / "base", How())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    want = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)


def test_an_adapter_without_its_base_or_of_another_is_refused(tmp_path):
    adapted(tmp_path, *CASES["dense"], torch.float32)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="base") as gone:
        adapter_to_hf(tmp_path / "adapter", tmp_path / "merged", None, How())
    assert (gone.value.code, gone.value.fix) == ("CFG05", "--origin-hf-dir FOLDER")
    other = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE | {"intermediate_size": 96}))
    other.save_pretrained(str(tmp_path / "other"))
    with pytest.raises(DataError, match="do not fit") as raised:
        adapter_to_hf(tmp_path / "adapter", tmp_path / "merged", tmp_path / "other", How())
    assert raised.value.code == "TOK46"
    assert "[5, 80] in the folder and [5, 96] in the model" in raised.value.why
    assert not (tmp_path / "merged").exists()


def test_the_command_merges_in_another_dtype_and_says_into_which_base(cli, tmp_path):
    adapted(tmp_path, *CASES["dense"], torch.bfloat16)
    words = ("convert", "adapter-to-hf", tmp_path / "adapter", tmp_path / "merged", "--dtype", "float32", "--json")
    done = cli(*words)
    assert done.code == 0, done.err
    assert json.loads(done.out)["path"] == str(tmp_path / "merged")
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.float32
    }
    assert (
        f"does not say what base it was trained on: it is merged into the weights as {tmp_path / 'base'}" in done.err
    )
    assert "--base-weights nf4" in done.err
    stated = cli(*words, "--force", "--base-weights", "auto")
    assert (stated.code, "does not say" in stated.err) == (0, False)
