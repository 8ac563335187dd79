"""torch_dist folders written from a model folder and read back bit for bit, or refused before a byte is written."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_family import BRIDGE, back, same, tensors_of, to_dist, write_folder

from slime_convert.bridge import join
from slime_convert.folder_writing import How
from slime_core import durable
from slime_core.errors import DataError, PluginError, StorageError
from slime_core.weights.folder import read_config
from slime_core.weights.shards import Shards
from slime_megatron.convert.conversion import hf_to_dist

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def read_by_torch(folder):
    """Every tensor of a folder, by torch.distributed.checkpoint's own reader."""
    reader = dcp.FileSystemReader(folder)
    held = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in reader.read_metadata().state_dict_metadata.items()
        if hasattr(meta, "size")
    }
    dcp.load(held, storage_reader=reader, no_dist=True)
    return held


@pytest.mark.parametrize("workers", [1, 3])
def test_a_round_trip_is_bit_identical(tmp_path, source, workers):
    done = to_dist(source, tmp_path / "dist", workers=workers)
    assert done.files > 2
    same(back(tmp_path / "dist", tmp_path / "again", source, workers=workers, shard=3000), tensors_of())
    assert len(list((tmp_path / "again").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "again" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "again" / "tokenizer.json").is_file()


def test_torch_itself_reads_the_whole_tensors_that_the_bridge_makes(tmp_path, source):
    to_dist(source, tmp_path / "dist")
    found, stored = read_by_torch(tmp_path / "dist" / "release"), tensors_of()
    config = read_config(source)
    sizes = BRIDGE.sizes(config, 128)
    for entry in BRIDGE.entries(config):
        whole = join(entry, [stored[name] for name in entry.hf], sizes)
        key = entry.megatron.replace(f"layers.{entry.layer}.", "layers.")
        assert torch.equal(found[key] if entry.layer < 0 else found[key][entry.layer], whole), entry.megatron
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_norms_have_the_names_of_both_layer_specs_and_modules_their_empty_state(tmp_path, source):
    to_dist(source, tmp_path / "dist")
    held = dcp.FileSystemReader(tmp_path / "dist" / "release").read_metadata()
    plain, fused = (
        [
            held.storage_data[dcp.metadata.MetadataIndex(key, [1, 0])]
            for key in (f"decoder.layers.{a}", f"decoder.layers.{b}")
        ]
        for a, b in [
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ]
    )
    assert plain[0] == plain[1]
    assert fused[0] == fused[1]
    states = [key for key in held.state_dict_metadata if "_extra_state" in key]
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_3" in states
    assert "decoder.final_layernorm._extra_state/shard_0_1" in states
    assert not any("embedding" in key or "output_layer" in key for key in states)


@pytest.mark.parametrize("multiple", [1, 50, 128])
def test_the_vocabulary_is_filled_with_zeros_and_cut_again(tmp_path, source, multiple):
    to_dist(source, tmp_path / "dist", divisible_by=multiple)
    found = read_by_torch(tmp_path / "dist" / "release")["output_layer.weight"]
    assert len(found) == -(-99 // multiple) * multiple
    assert not found[99:].any()
    same(back(tmp_path / "dist", tmp_path / "again", source), tensors_of())


def test_tied_weights_are_stored_once(tmp_path):
    source = write_folder(tmp_path / "hf", tie_word_embeddings=True)
    to_dist(source, tmp_path / "dist")
    assert "output_layer.weight" not in read_by_torch(tmp_path / "dist" / "release")
    same(back(tmp_path / "dist", tmp_path / "again", source), tensors_of(tie_word_embeddings=True))


def test_a_copy_of_a_tied_weight_is_left_out_and_another_is_refused(tmp_path):
    tensors = tensors_of(tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    to_dist(write_folder(tmp_path / "hf", tensors, tie_word_embeddings=True), tmp_path / "dist")
    tensors["lm_head.weight"][80, 3] += 1
    with pytest.raises(DataError) as caught:
        to_dist(write_folder(tmp_path / "other", tensors, tie_word_embeddings=True), tmp_path / "none")
    assert caught.value.code == "TOK49"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_dtypes_are_cast_on_either_way_and_the_config_says_so(tmp_path, dtype):
    stored = tensors_of(torch.float32)
    source = write_folder(tmp_path / "hf", stored, dtype="float32")
    meant = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.items()}
    to_dist(source, tmp_path / "cast", dtype=dtype)
    same(back(tmp_path / "cast", tmp_path / "one", source), meant)
    to_dist(source, tmp_path / "kept")
    same(back(tmp_path / "kept", tmp_path / "two", source, dtype=dtype), meant)
    for name in ("one", "two"):
        assert json.loads((tmp_path / name / "config.json").read_bytes())["dtype"] == dtype


def test_layers_of_several_dtypes_cannot_be_stacked_unless_they_are_cast(tmp_path):
    tensors = tensors_of()
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].float()
    source = write_folder(tmp_path / "hf", tensors)
    with pytest.raises(DataError, match=r"decoder.layers.mlp.linear_fc2.weight is .*bfloat16.*float32"):
        to_dist(source, tmp_path / "none")
    to_dist(source, tmp_path / "dist", dtype="bfloat16")


def test_parts_of_one_tensor_have_one_dtype(tmp_path):
    tensors = tensors_of()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].float()
    with pytest.raises(DataError, match="TOK48"):
        to_dist(write_folder(tmp_path / "hf", tensors), tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 missing, 0 extra, 0 mis-shaped"),
        (lambda t: t.update({"model.layers.7.stranger": torch.ones(2)}), "0 missing, 1 extra, 0 mis-shaped"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(17)}),
            "model.norm.weight is [17] in the folder, [16] in",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(98, 16)}),
            "lm_head.weight is [98, 16] in the folder, [99, 16]",
        ),
    ],
    ids=["missing", "extra", "mis-shaped", "vocabulary"],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_written(tmp_path, change, said):
    tensors = tensors_of()
    change(tensors)
    source = write_folder(tmp_path / "hf", tensors)
    with pytest.raises(DataError) as caught:
        to_dist(source, tmp_path / "dist")
    assert caught.value.code == "TOK46"
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == ["hf"]


def test_a_safetensors_file_that_was_cut_short_is_told_before_anything_is_written(tmp_path, source):
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(DataError) as caught:
        to_dist(source, tmp_path / "dist")
    assert caught.value.code == "TOK47"
    assert f"the file has {file.stat().st_size}" in caught.value.why
    assert os.listdir(tmp_path) == ["hf"]


def test_a_source_that_is_cut_while_it_is_read_loses_nothing(tmp_path, source, monkeypatch):
    class Cutting(durable.Disk):
        def create(self, path):
            if path.name == "__0_1.distcp":
                os.truncate(source / "model.safetensors", 5000)
            return super().create(path)

    monkeypatch.setattr(durable, "disk", Cutting())
    with pytest.raises(DataError) as caught:
        to_dist(source, tmp_path / "dist", workers=1)
    assert caught.value.code == "TOK47"
    assert "the file has 5000" in caught.value.why
    assert not (tmp_path / "dist").exists()


def test_a_bridge_that_tells_no_shapes_is_refused(tmp_path, source):
    blind = replace(BRIDGE, rows=[replace(row, shape="") for row in BRIDGE.rows])
    with pytest.raises(PluginError, match="does not say the shape of"):
        hf_to_dist(source, tmp_path / "dist", lambda config: blind, How())


class Flipping(durable.Disk):
    """A device that changes a byte of one file."""

    def __init__(self, name):
        self.name, self.fds = name, set()

    def create(self, path):
        fd = super().create(path)
        if path.name == self.name:
            self.fds.add(fd)
        return fd

    def write(self, fd, data, offset):
        data = bytearray(data)
        if fd in self.fds and offset > 3000:
            data[0] ^= 1
            self.fds.discard(fd)
        super().write(fd, bytes(data), offset)


def test_verify_finds_a_changed_bit_and_publishes_nothing(tmp_path, source, monkeypatch):
    to_dist(source, tmp_path / "good")
    monkeypatch.setattr(durable, "disk", Flipping("model.safetensors"))
    with pytest.raises(StorageError) as caught:
        back(tmp_path / "good", tmp_path / "bad", source)
    assert caught.value.code == "STO112"
    assert "was written otherwise" in str(caught.value)
    assert not (tmp_path / "bad").exists()


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(tmp_path, source, monkeypatch):
    to_dist(source, tmp_path / "whole")

    class Full(durable.Disk):
        def create(self, path):
            if path.name == "__0_2.distcp":
                raise OSError(28, "No space left on device", str(path))
            return super().create(path)

    monkeypatch.setattr(durable, "disk", Full())
    with pytest.raises(StorageError, match="STO109"):
        to_dist(source, tmp_path / "cut", workers=1)
    monkeypatch.setattr(durable, "disk", durable.Disk())
    assert to_dist(source, tmp_path / "cut").kept == 2
    for name in ("__0_0.distcp", "__0_1.distcp", "__0_2.distcp"):
        assert (tmp_path / "cut" / "release" / name).read_bytes() == (
            tmp_path / "whole" / "release" / name
        ).read_bytes()
    same(back(tmp_path / "cut", tmp_path / "again", source), dict(Shards.open(source)))
