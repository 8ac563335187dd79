"""Weight updates in fp8: what is sent, in which order, and what its checksums are of."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.config.schema import Config
from slime_core.errors import EngineError, TrainerError
from slime_core.testing.families import family_model
from slime_core.testing.models import fp8_model
from slime_core.trainers.fsdp.adapters import MergedWeights
from slime_core.trainers.fsdp.publishing import rounded, sources_of
from slime_core.types import Piece, RankTensor, WeightRoute
from slime_core.weights.canary import compare
from slime_core.weights.folder import ModelFolder
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.fp8 import BlockFormat, rollout_form
from slime_core.weights.hashing import checksum, expected
from slime_core.weights.logprob_check import Band
from slime_core.weights.shards import Shards
from slime_core.weights.transports.buckets import Staging, TensorPart, TensorSource, lay_out, one_part, stream
from slime_core.weights.transports.quantised import in_fp8
from slime_core.weights.transports.senders import Senders

pytestmark = pytest.mark.unit

FORMAT = BlockFormat()
LAYER = "model.layers.0"
QKV = RankTensor(
    name=f"{LAYER}.self_attn.qkv_proj.weight",
    pieces=tuple(Piece(name=f"{LAYER}.self_attn.{which}_proj.weight") for which in "qkv"),
)
NORM = RankTensor(name="model.norm.weight", pieces=(Piece(name="model.norm.weight"),))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture of experts, whose experts are stacks in the trainer."""
    path = family_model(tmp_path_factory.mktemp("moe") / "m", "qwen3-moe", hidden_size=192, moe_intermediate_size=160)
    return ModelFolder.open(path)


@pytest.fixture(scope="module")
def hf(model):
    return model.build_model()


@pytest.fixture
def update(model, hf, tmp_path):
    """One by disk, with checksums of two rows."""
    senders = Senders(torch.device("cpu"), model.path, Config(), FORMAT)
    sources = sources_of(MergedWeights(None, dict(hf.named_parameters())), CPU, FolderLayout(hf).parts)
    route = WeightRoute(transport="disk", dtype="bfloat16", folder=str(tmp_path / "w"), checks=(QKV, NORM))
    return senders.publish(sources, 3, route)


def test_a_folder_has_numbers_and_scales_of_linear_layers_and_says_so(model, update, tmp_path):
    folder = tmp_path / "w" / "v-3"
    stored, floats = {}, model.tensors()
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    weights = sorted(name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv"))
    assert len(weights) == 2 * (4 + 4 * 3)  # attention, and three matrices of each expert
    assert stored.keys() - {f"{name}_scale_inv" for name in weights} == floats.keys()
    for name in weights:
        numbers, scales = stored[name], stored[f"{name}_scale_inv"]
        assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(scales, FORMAT.scales(floats[name]))
        assert torch.equal(numbers.float(), FORMAT.quantise(floats[name], scales).float())
    for name in floats.keys() - set(weights):
        assert torch.equal(stored[name], floats[name].to(torch.bfloat16))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert (config["quantization_config"]["quant_method"], config["dtype"]) == ("fp8", "bfloat16")


def test_checksums_are_of_the_values_of_what_was_sent(hf, update, tmp_path):
    values = {name: t.to(torch.bfloat16) for name, t in Shards.open(tmp_path / "w" / "v-3").items()}
    assert update.fingerprints == {
        QKV.key: checksum(torch.cat([values[piece.name] for piece in QKV.pieces])),
        NORM.key: checksum(values[NORM.name]),
    }
    assert update.fingerprints == expected(Shards.open(tmp_path / "w" / "v-3"), (QKV, NORM), torch.bfloat16)
    named = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    engine = rounded(named, FORMAT, FolderLayout(hf).parts)
    name = QKV.pieces[1].name
    assert torch.equal(engine[name].to(torch.bfloat16), values[name])  # what the embedded engine computes with
    stack = engine[f"{LAYER}.mlp.experts.gate_up_proj"].to(torch.bfloat16)
    assert torch.equal(stack[2, 160:], values[f"{LAYER}.mlp.experts.2.up_proj.weight"])


def test_of_a_folder_in_fp8_those_weights_are_quantised_that_it_has_so(model, hf, tmp_path):
    path = fp8_model(tmp_path / "fp8", model.path)
    tensors, name = load_file(path / "model.safetensors"), f"{LAYER}.self_attn.o_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: tensors[name].float()}, path / "model.safetensors")
    form = rollout_form("fp8", ModelFolder.open(path).stored_in)
    sources = sources_of(MergedWeights(None, dict(hf.named_parameters())), CPU, FolderLayout(hf).parts)
    parts = [part for one in in_fp8(sources, form) for part in one.parts]
    sent = {part.name for part in parts if part.dtype is torch.float8_e4m3fn}
    assert sent == {one.removesuffix("_scale_inv") for one in tensors if one.endswith("_scale_inv")}
    assert (len(sent), name in sent) == (31, False)


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_a_damaged_tensor_is_found_whether_numbers_or_scales(update, tmp_path, part):
    folder, name = tmp_path / "w" / "v-3", f"{LAYER}.self_attn.k_proj.{part}"
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    damaged = tensors[name]
    damaged.view(torch.uint8).view(-1)[3 if part != "weight" else 70] ^= 0x40
    save_file(tensors, file)
    served = expected(Shards.open(file.parent), (QKV, NORM), torch.bfloat16)
    with pytest.raises(EngineError, match="qkv_proj") as caught:
        compare((QKV, NORM), update.fingerprints, {"server 0": served}, 3)
    assert caught.value.code == "ENG83"


@pytest.mark.parametrize("most", [0, 9000])
def test_a_staging_begins_every_tensor_at_a_multiple_of_its_size(most):
    draw = torch.Generator().manual_seed(0)
    shapes = {f"{LAYER}.mlp.down_proj.weight": (65, 129), "model.norm.weight": (7,), f"{LAYER}.x_proj.weight": (3, 3)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    parts = {name: TensorPart(name, shape, lambda whole: whole) for name, shape in shapes.items()}
    sources = in_fp8([TensorSource((parts[name],), lambda t=t: t) for name, t in tensors.items()], FORMAT)
    buckets = lay_out([part for source in sources for part in source.parts], "bfloat16", most)
    assert all(slot.begin % slot.dtype.itemsize == 0 for bucket in buckets for slot in bucket.slots)
    staging = Staging(buckets, lambda size: torch.full((size,), 255, dtype=torch.uint8))
    staging.fill(stream(sources))
    assert set(staging.views) == {*shapes, *(f"{name}_scale_inv" for name in shapes if "norm" not in name)}
    for name in shapes:
        if name != "model.norm.weight":
            scales = staging.views[f"{name}_scale_inv"]
            assert torch.equal(scales, FORMAT.scales(tensors[name]))
            assert torch.equal(staging.views[name].float(), FORMAT.quantise(tensors[name], scales).float())
    assert torch.equal(staging.views["model.norm.weight"], tensors["model.norm.weight"].bfloat16())


def test_a_model_without_known_linear_layers_is_refused():
    tensors = {"transformer.h.0.mlp.c_fc.weight": torch.ones(4, 4)}
    with pytest.raises(TrainerError, match="no linear layers") as caught:
        in_fp8(sources_of(MergedWeights(None, tensors), CPU, one_part), FORMAT)
    assert caught.value.fix == "--rollout-quantization none"
    with pytest.raises(TrainerError, match="no linear layers"):
        rounded(tensors, FORMAT, one_part)
    assert rounded({}, FORMAT, one_part) == {}  # of a rank that publishes nothing


def test_the_band_of_log_probs_is_five_times_as_wide_and_ends_at_the_ceiling():
    import numpy as np

    assert (Band("bfloat16").limit, Band("bfloat16", fp8=True).limit) == (0.05, 0.25)
    assert Band("bfloat16", fp8=True, mixture=True).limit == 0.5
    assert Band("bfloat16", 0.7, fp8=True).limit == 0.7
    exact = np.zeros(4, dtype=np.float32)
    for rounding, limit in ((0.002, 0.1), (0.01, 0.2), (0.1, 0.5)):
        band = Band("bfloat16", fp8=True)
        band.measure(exact, exact + np.float32(rounding))
        assert band.limit == pytest.approx(limit)
