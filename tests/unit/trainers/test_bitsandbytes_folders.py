"""Model folders in nf4 that transformers and bitsandbytes write: their floats, bits kept as a base, and refusals."""

import json
import re
import shutil

import bitsandbytes.functional
import pytest
import splits
import torch
import trainer_bench as made
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from slime_convert.rows import StoredRows, read_whole
from slime_core.errors import DataError
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.testing import tiny_model
from slime_core.testing.families import family_model
from slime_core.weights.folder import ModelFolder
from slime_core.weights.nf4 import STATE
from slime_core.weights.shards import Shards

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

IDS = torch.arange(3, 40)[None]
FORMS = {"plain": (False, torch.float32), "double": (True, torch.float32), "half": (True, torch.bfloat16)}


def settings(double, dtype):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model that transformers loads in 4 bits and saves, by form."""
    root = tmp_path_factory.mktemp("nf4")
    origin = tiny_model(root / "origin", hidden=128, tied=True)
    folders = {}
    for name, (double, dtype) in FORMS.items():
        folders[name] = root / name
        shutil.copytree(origin, root / name, ignore=shutil.ignore_patterns("*.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(origin, quantization_config=settings(double, dtype), dtype=dtype)
        model.save_pretrained(root / name)
    return folders


def linear_layers(model):
    """Weights of layers in 4 bits, by name."""
    named = {f"{name}.weight": getattr(module, "weight", None) for name, module in model.named_modules()}
    return {name: weight for name, weight in named.items() if hasattr(weight, "quant_state")}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_loads_as_the_floats_that_transformers_computes_with(saved, form):
    reference = AutoModelForCausalLM.from_pretrained(saved[form]).train()  # in eval mode its products are in bfloat16
    folder = ModelFolder.open(saved[form])
    layers = linear_layers(reference)
    assert len(layers) == 2 * 7
    infos = folder.tensors().infos
    assert layers.keys() == {name for name, info in infos.items() if info.stored}
    for name, weight in layers.items():
        floats = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(folder.tensors()[name], floats), name
    model = folder.build_model(str(FORMS[form][1]).removeprefix("torch."))
    expected = reference(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-2 if form == "half" else 1e-5, atol=1e-4)
    assert any("--base-weights nf4" in notice for notice in folder.notices)


def pack(weight, double=False):
    """The tensors of a weight in nf4 by the ends of their names, and its floats."""
    functional = bitsandbytes.functional
    numbers, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    tensors = {f".{key}": one for key, one in state.as_dict(packed=True).items()} | {"": numbers}
    state.shape = (1, weight.numel())  # bitsandbytes takes blocks of rows on a CPU, where they are of all numbers
    return tensors, functional.dequantize_4bit(numbers, state).view(weight.shape)


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("shape", [(400, 96), (37, 50), (5, 320), (10, 33)], ids=str)
def test_blocks_need_not_end_with_rows(shape, double, tmp_path):
    tensors, floats = pack(torch.randn(shape, generator=torch.Generator().manual_seed(1)), double)
    save_file({f"w{end}": one for end, one in tensors.items()}, tmp_path / "model.safetensors")
    shards = Shards.open(tmp_path)
    assert list(shards) == ["w"]
    assert torch.equal(shards["w"], floats)
    for first, count in ((0, 1), (2, 3), (shape[0] - 1, 1)):
        assert torch.equal(Shards({"w": shards.infos["w"].rows(first, count)})["w"], floats[first : first + count])
    assert torch.equal(read_whole(StoredRows(shards.infos["w"])), floats)
    assert (shards.stored("w") is None) == (shape[1] % 64 > 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_base_of_adapters_keeps_the_folders_bits_and_learns(saved, form, tmp_path):
    dtype = str(FORMS[form][1]).removeprefix("torch.")
    one = made.Bench(saved[form], lora_rank=4, kl_loss_coef=0.05, base_weights="nf4", dtype=dtype)
    base = {name: weight.detach() for name, weight in one.worker.policy.base().items()}
    held = {name: weight for name, weight in base.items() if isinstance(weight, QuantisedWeight)}
    assert len(held) == 2 * 7
    stored = load_file(saved[form] / "model.safetensors")
    shards = one.folder.tensors()
    for name, weight in held.items():
        assert torch.equal(weight.numbers.flatten(), stored[name].flatten())
        assert torch.equal(weight.dense(), shards[name]), name
    if form != "half":
        splits.fill_adapters(one.worker)
        error = one.call("verify", splits.with_roles(made.batch_of()))
        assert max(error["gradient_error"], error["loss_error"]) < 3e-5
    before = one.parameters()
    one.call("step", splits.with_roles(made.batch_of()))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in one.parameters().items())
    one.call("export", tmp_path / "final")
    assert "quantization_config" not in json.loads((tmp_path / "final" / "config.json").read_text())
    exported = load_file(tmp_path / "final" / "model.safetensors")
    served = one.call("publish", 1).tensors
    for name in held:
        assert torch.equal(exported[name], served[name]), name
        assert not torch.equal(exported[name], shards[name]), name
    one.thread.close()


def test_matrices_of_experts_stay_in_their_bits_in_a_stack(tmp_path):
    origin, packed = family_model(tmp_path / "origin", "qwen3-moe"), tmp_path / "packed"
    shutil.copytree(origin, packed)
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors |= {name + end: one for end, one in pack(tensors[name])[0].items()}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    table = {"quantization_config": settings(double=False, dtype=torch.float32).to_dict()}
    (packed / "config.json").write_text(json.dumps(config | table))
    one = made.Bench(packed, lora_rank=4, base_weights="nf4")
    base = {name: weight.detach() for name, weight in one.worker.policy.base().items()}
    held = {name: weight for name, weight in base.items() if isinstance(weight, QuantisedWeight)}
    assert {name.rpartition(".experts.")[2] for name in held} == {"gate_up_proj"}, "the rest is floats in the folder"
    floats = dict(one.folder.build_model("float32").named_parameters())
    assert all(torch.equal(weight.dense(), floats[name]) for name, weight in held.items())
    one.thread.close()


def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(f"{NAME}.absmax"), "there is no absmax"),
        (lambda tensors: tensors.pop(f"{NAME}.nested_quant_map"), "there is no nested_quant_map"),
        (lambda tensors: tensors.update({NAME: tensors[NAME][:-1]}), r"8191, 1\] U8, and 8192 numbers are needed"),
        (lambda tensors: tensors.update({f"{NAME}{STATE}": torch.zeros(4, dtype=torch.uint8)}), "Expecting value"),
    ],
    ids=["scales", "map", "numbers", "state"],
)
def test_a_weight_without_all_that_it_is_stored_in_is_refused(saved, change, reason, tmp_path):
    folder = shutil.copytree(saved["double"], tmp_path / "damaged")
    rewritten(folder, change)
    with pytest.raises(DataError, match=NAME) as raised:
        ModelFolder.open(folder)
    assert raised.value.code == "TOK46"
    assert re.search(reason, raised.value.why)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, ("LLM.int8", "rounds activations too")),
        ({"bnb_4bit_quant_type": "fp4"}, ("fp4 of bitsandbytes", "nf4 of bitsandbytes")),
    ],
    ids=["8 bits", "fp4"],
)
def test_other_forms_of_bitsandbytes_are_refused_by_name(saved, table, words, tmp_path):
    folder = shutil.copytree(saved["plain"], tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= table
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=words[0]) as raised:
        ModelFolder.open(folder)
    assert (raised.value.code, words[1] in raised.value.why) == ("TOK48", True)
