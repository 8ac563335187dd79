"""Adapter folders against peft itself: theirs in our layers, ours in theirs, and folders that cannot be used."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config, Qwen3MoeConfig

from slime_core.config.sections.train import TrainSection
from slime_core.errors import ConfigError, DataError
from slime_core.lora.folder import BaseForm, factors_of, read_factors, read_spec, start_notices, write_adapter
from slime_core.lora.layers import attach
from slime_core.lora.spec import LoraSpec

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore"),  # of peft and what it imports
]

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "all-linear": (Qwen3Config(**SHAPE), {"target_modules": "all-linear"}),
    "rslora": (Qwen3Config(**SHAPE), {"target_modules": ["q_proj", "layers.1.mlp.down_proj"], "use_rslora": True}),
    "dora": (Qwen3Config(**SHAPE), {"target_modules": r".*\.1\.self_attn\.[qo]_proj", "use_dora": True}),
    "experts": (Qwen3MoeConfig(**SHAPE, **EXPERTS), {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    "experts alone": (Qwen3MoeConfig(**SHAPE, **EXPERTS), {"target_modules": [], "target_parameters": STACKS[1:]}),
    "experts of in by out": (
        GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
        {"target_modules": ["q_proj"], "target_parameters": STACKS},
    ),
}
IDS = torch.arange(24).view(2, 12)


def built(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def peft_model(config, **settings):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(built(config), LoraConfig(r=3, lora_alpha=5, **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "magnitude" in name:
            parameter.data.mul_(1.25)
    return model


def loaded(folder, model):
    """Our layers with the adapter of a folder."""
    adapters = attach(model, read_spec(folder), seed=0)
    factors = factors_of(adapters, "default")
    for weight, one in read_factors(folder, factors).items():
        for part in ("a", "b", "magnitude"):
            if getattr(one, part) is not None:
                getattr(factors[weight], part).data.copy_(getattr(one, part))
    return adapters, factors


@torch.no_grad()
@pytest.mark.parametrize(("config", "settings"), CASES.values(), ids=CASES)
def test_an_adapter_of_peft_gives_its_logits_here_and_comes_back_to_it_unchanged(config, settings, tmp_path):
    from peft import PeftModel

    reference = peft_model(config, **settings)
    reference.save_pretrained(str(tmp_path / "peft"))
    want = reference(IDS).logits
    model = built(config)
    without = model(IDS).logits
    adapters, factors = loaded(tmp_path / "peft", model)
    torch.testing.assert_close(model(IDS).logits, want, rtol=1e-5, atol=1e-6)
    assert (want - without).abs().max() > 1e-3
    write_adapter(tmp_path / "slime", adapters.spec.to_peft("the-base"), factors)
    again = PeftModel.from_pretrained(built(config), str(tmp_path / "slime")).eval()
    assert torch.equal(again(IDS).logits, want)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "slime"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def folder(tmp_path):
    """Ours, of q_proj, whose tensors a test changes."""
    adapters = attach(built(Qwen3Config(**SHAPE)), LoraSpec(rank=3, target_modules=("q_proj",)), seed=0)
    write_adapter(tmp_path / "adapter", adapters.spec.to_peft("the-base"), factors_of(adapters, "default"))
    return tmp_path / "adapter"


def read(folder, **changes):
    adapters = attach(built(Qwen3Config(**SHAPE | changes)), read_spec(folder), seed=0)
    return read_factors(folder, factors_of(adapters, "default"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "LOHA"),
        ("rank_pattern", {"q_proj": 4}),
        ("init_lora_weights", "pissa"),
        ("bias", "all"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(folder, setting, value):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(DataError, match=setting) as raised:
        read(folder)
    assert raised.value.code == "TOK46"
    assert "merge" in raised.value.fix


def without_tensor(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, file)


def of_another_rank(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))


def with_more_layers(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items()}, file)


def as_pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut_short(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def without_config(folder):
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (without_tensor, "TOK46", "1 missing: model.layers.1.self_attn.q_proj.lora_B.weight"),
        (of_another_rank, "TOK46", r"lora_A.weight is \[3, 16\] in the folder and \[4, 16\]"),
        (with_more_layers, "TOK46", "of no target in the model: model.layers.2.self_attn.q_proj"),
        (as_pickle, "TOK46", "pickles can run any code"),
        (cut_short, "TOK47", "cut short"),
        (without_config, "TOK00", "adapter_config.json"),
    ],
)
def test_a_bad_folder_is_refused_with_what_is_wrong(folder, spoil, code, words):
    spoil(folder)
    with pytest.raises(DataError, match=words) as raised:
        read(folder)
    assert raised.value.code == code
    assert str(folder) in raised.value.where
    assert raised.value.fix


def test_a_start_on_another_base_is_said_where_the_folder_tells_its_own(tmp_path):
    adapters = attach(built(Qwen3Config(**SHAPE)), LoraSpec(rank=4), seed=0)
    notices = {}
    for was in ("auto", "fp8", ""):
        base = BaseForm(was, "bfloat16")
        write_adapter(tmp_path, adapters.spec.to_peft("base"), factors_of(adapters, "default"), base)
        for now in ("auto", "nf4"):
            train = TrainSection(lora_rank=4, base_weights=now, lora_load=str(tmp_path))
            notices[was, now] = [f"--base-weights {was} " in text for text in start_notices(train)]
    assert notices == {
        **{("auto", "auto"): [], ("auto", "nf4"): [True], ("fp8", "auto"): [True], ("fp8", "nf4"): [True]},
        **{("", "auto"): [], ("", "nf4"): []},
    }


def test_another_base_and_no_folder_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"\[3, 16\] in the folder and \[3, 32\]") as raised:
        read(folder, hidden_size=32)
    assert "base_model_name_or_path" in raised.value.fix
    with pytest.raises(ConfigError, match="no adapter folder") as none:
        read_spec(tmp_path / "nowhere")
    assert (none.value.code, none.value.where.split()[0]) == ("CFG05", "train.lora_load")
