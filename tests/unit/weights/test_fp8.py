"""Quantised weights: the arithmetic of blocks, and folders in the form of published ones."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slime_core.errors import DataError
from slime_core.testing.families import family_config, family_model
from slime_core.testing.models import fp8_model, tiny_model
from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.build import skeleton
from slime_core.weights.folder import ModelFolder, parameter_count
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.shards import Shards

pytestmark = pytest.mark.unit


def e4m3(byte):
    """The value of a byte by the format's definition: a sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if sign else value


TABLE = np.array([e4m3(byte) for byte in range(256)], dtype=np.float32)


def dequantised(weight, scales, block=128):
    """The values of a weight, an element at a time; float32 rounded to bfloat16."""
    codes, by_block = weight.view(torch.uint8).numpy(), scales.numpy()
    rows, columns = codes.shape
    row, column = np.arange(rows)[:, None] // block, np.arange(columns)[None, :] // block
    return torch.from_numpy(TABLE[codes] * by_block[row, column]).to(torch.bfloat16)


def test_a_block_is_what_one_works_out_by_hand():
    small = BlockFormat(block=(2, 2))
    weight = torch.tensor([[448.0, -1.0, 0.5], [0.0, 17.0, -2.0], [3.0, 1.0, 7.0]])
    scales = small.scales(weight)
    # largest values 448, 2, 3 and 7 over 448; the blocks at the edges hold one column, or one row
    assert torch.equal(scales, torch.tensor([[448.0, 2.0], [3.0, 7.0]]) / 448)
    codes = small.quantise(weight, scales)
    # steps between 16 and 32 are 2, so 17 is in the middle and goes to the even mantissa; 0.5 / 2 * 448 = 112, and
    # 1 / 3 * 448 = 149.33, where steps are 16: 144
    assert torch.equal(codes.float(), torch.tensor([[448.0, -1.0, 112.0], [0.0, 16.0, -448.0], [448.0, 144.0, 448.0]]))
    values = small.dequantise(codes, scales, torch.float32)
    expected = torch.tensor([[448.0, -1.0, 0.5], [0.0, 16.0, -2.0], [3.0, 144 / 448 * 3, 7.0]])
    assert torch.allclose(values, expected, rtol=1e-6, atol=0)


def test_values_that_the_format_has_come_back_bit_for_bit():
    finite = torch.from_numpy(TABLE[np.isfinite(TABLE) & (np.abs(TABLE) <= 448)]).unique()
    weight = finite.repeat(130)[: 130 * 200].reshape(130, 200) * 2.0**-9
    weight[::129, ::150] = 448 * 2.0**-9  # the largest of each block, so that its scale is a power of two
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(BlockFormat().rounded(weight.to(dtype)), weight.to(dtype))
    assert not BlockFormat().rounded(torch.zeros(3, 5)).any()


def test_rounding_moves_no_value_by_more_than_its_block_allows():
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    block_format = BlockFormat()
    scales = block_format.scales(weight)
    codes = block_format.quantise(weight, scales)
    assert (codes.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (3, 2))
    assert torch.equal(block_format.dequantise(codes, scales, torch.bfloat16), dequantised(codes, scales))
    error = (block_format.rounded(weight) - weight).abs()
    spread = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    # half a step is 2^-4 of the value, and 2^-10 of the scale below the smallest normal one
    assert bool((error <= weight.abs() * 2.0**-4 * 1.001 + spread * 2.0**-10).all())
    assert float(error.mean()) > 0.005


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.17.w2.weight", True),
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.input_layernorm.weight", False),
        ("model.layers.61.eh_proj.weight", False),
        ("model.layers.7.mlp.up_proj.weight", False),
        ("model.layers.70.mlp.up_proj.weight", True),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_linear_layers_are_in_fp8_and_nothing_else(name, covered):
    assert BlockFormat(float_modules=("model.layers.7.mlp", "lm_head")).covers(name) is covered


def test_of_linear_attention_all_is_in_fp8_but_its_gates_which_a_config_names():
    """SGLang has every linear layer in fp8 that a config does not name, but for routers."""
    text = family_config("qwen3-next", 40).to_dict()
    named = {*BlockFormat().table()["modules_to_not_convert"], "gate", "shared_expert_gate", "lm_head"}
    parts = set()
    for config in (family_config("qwen3-next", 40), transformers.Qwen3_5MoeTextConfig(**text)):
        for name, module in skeleton(config).named_modules():
            if isinstance(module, torch.nn.Linear):
                part = name.rpartition(".")[2]
                assert BlockFormat().covers(f"{name}.weight") is (part not in named), name
                parts |= {part}
    assert {"in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"} <= parts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_of_a_model_that_sees_pictures_the_tower_stays_in_floats(tmp_path, family):
    folder = tiny_vision_model(tmp_path / "model", family)
    covered = sorted(name for name in Shards.open(folder) if BlockFormat().covers(name))
    assert len(covered) == 3 * (4 + 3)  # attention and MLP of each layer of text
    assert not any(part in name for name in covered for part in ("visual", "vision", "connector"))
    if family != "smolvlm":  # which SGLang does not serve; of the others it must be told every linear layer
        named = set(BlockFormat().table()["modules_to_not_convert"])
        for name, module in skeleton(ModelFolder.open(folder).config).named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
                assert BlockFormat().covers(f"{name}.weight") is not bool(named & set(name.split("."))), name


@pytest.fixture(params=["qwen3", "qwen3-moe", "deepseek-v2", "qwen3-next"])
def folders(request, tmp_path):
    """A folder in fp8, and its float twin, whose weights were dequantised without slime's code."""
    family_model(tmp_path / "model", request.param, hidden_size=192, intermediate_size=320)
    fp8_model(tmp_path / "fp8", tmp_path / "model")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    names = [name for name in tensors if f"{name}_scale_inv" in tensors]
    assert len(names) >= 14
    twin = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    twin |= {name: dequantised(tensors[name], tensors[f"{name}_scale_inv"]) for name in names}
    shutil.copytree(tmp_path / "model", tmp_path / "twin", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(twin, tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "fp8", tmp_path / "twin"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_in_fp8_is_its_float_twin(folders, dtype, tmp_path):
    opened, twin = (ModelFolder.open(folder) for folder in folders)
    assert dict(opened.tensors()).keys() == dict(twin.tensors()).keys()
    assert all(torch.equal(tensor, twin.tensors()[name]) for name, tensor in opened.tensors().items())
    model, expected = opened.build_model(dtype), twin.build_model(dtype)
    states = model.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert {type(module) for module in model.modules()} == {type(module) for module in expected.modules()}
    model.save_pretrained(tmp_path / "written")
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    ModelFolder.open(folders[1])
    assert any("fp8" in text for text in opened.notices)
    assert not any("fp8" in text for text in twin.notices)


@pytest.mark.parametrize(
    ("change", "code", "what", "why"),
    [
        (lambda t, n: t.pop(f"{n}_scale_inv"), "TOK46", "no scales that fit", "there is no {}_scale_inv"),
        (
            lambda t, n: t.update({f"{n}_scale_inv": torch.ones(1, 1)}),
            "TOK46",
            "scales that fit",
            "[1, 1]; fp8 in blocks needs [2, 2]",
        ),
        (lambda t, n: t.update({f"{n}_scale_inv": torch.ones(2, 2).int()}), "TOK46", "scales that fit", "is I32"),
        (lambda t, n: t.update({n: t[n].view(2, -1, 256)}), "TOK46", "scales that fit", "scales are of matrices"),
    ],
    ids=["none", "shape", "integers", "three axes"],
)
def test_scales_that_do_not_fit_are_named_with_tensor_and_file(tmp_path, change, code, what, why):
    folder = fp8_model(tmp_path / "fp8", tiny_model(tmp_path / "model", hidden=128))
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name], tensors[f"{name}_scale_inv"] = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.ones(2, 2)
    change(tensors, name)
    save_file(tensors, file)
    with pytest.raises(DataError) as caught:
        ModelFolder.open(folder)
    error = caught.value
    assert (error.code, error.where) == (code, str(file))
    assert name in error.what
    assert what in error.what
    assert why.format(name) in error.why


@pytest.mark.parametrize(
    "table",
    [None, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "x"}],
)
def test_a_folder_that_does_not_say_its_blocks_is_refused(tmp_path, table):
    folder = fp8_model(tmp_path / "fp8", tiny_model(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": table}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="TOK48"):
        ModelFolder.open(folder)


def test_parameters_of_a_folder_in_fp8_are_those_of_its_float_twin(tmp_path):
    origin = tiny_model(tmp_path / "model", hidden=256)
    model = ModelFolder.open(origin).build_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameter_count(origin) == parameter_count(fp8_model(tmp_path / "fp8", origin))


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 32}}},
}


def test_a_folder_in_int4_is_its_float_twin(tmp_path):
    folder = tiny_model(tmp_path / "model")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    numbers = np.arange(64 * 128).reshape(64, 128) * 7 % 16  # what is stored, 8 above the value
    scales = torch.arange(1, 64 * 4 + 1).view(64, 4).to(torch.bfloat16) / 64
    values = (torch.from_numpy(numbers).float() - 8) * scales.float().repeat_interleave(32, 1)
    # the first number is the lowest half byte of a little-endian word: two numbers a byte, the first one below
    packed = torch.from_numpy((numbers[:, ::2] + 16 * numbers[:, 1::2]).astype(np.uint8).view(np.int32))
    others = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([64, 128])}
    del tensors[name]
    save_file(tensors | {name.replace("weight", kind): other for kind, other in others.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": INT4}))
    assert parameter_count(folder) == sum(tensor.numel() for tensor in tensors.values()) + values.numel()
    model = ModelFolder.open(folder).build_model()
    assert torch.equal(model.state_dict()[name], values.to(torch.bfloat16).float())
    assert model.state_dict().keys() == tensors.keys() | {name}


@pytest.mark.parametrize(
    "weights", [{"num_bits": 8}, {"symmetric": False}, {"group_size": None}, {"actorder": "group"}]
)
def test_int4_of_another_kind_is_refused(tmp_path, weights):
    folder = tiny_model(tmp_path / "model")
    groups = {"group_0": {"weights": INT4["config_groups"]["group_0"]["weights"] | weights}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": INT4 | {"config_groups": groups}}))
    with pytest.raises(DataError, match=r"TOK48.*compressed-tensors"):
        ModelFolder.open(folder)
