"""torch_dist folders: written from a model folder and read back bit for bit, or refused with names and numbers."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converting import BRIDGE, bridge_of, tensors_of, write_folder
from safetensors.torch import load_file

from slime_core import durable
from slime_core.errors import DataError, PluginError, StorageError
from slime_core.weights import dist_writing, rows
from slime_core.weights.bridge import join
from slime_core.weights.conversion import How, dist_to_hf, hf_to_dist
from slime_core.weights.dist import DistFolder
from slime_core.weights.folder import read_config
from slime_core.weights.shards import Shards

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks, chunks and files of a few rows: every tensor takes several of each."""
    monkeypatch.setattr(rows, "BLOCK", 100)
    monkeypatch.setattr(dist_writing, "CHUNK", 900)
    monkeypatch.setattr(dist_writing, "FILE", 8000)


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "hf")


def to_dist(source, target, **how):
    return hf_to_dist(source, target, bridge_of, How(verify=how.pop("verify", True), **how))


def back(dist, target, origin, **how):
    dist_to_hf(dist, target, origin, bridge_of, How(verify=True, **how))
    return {name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()}


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


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


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


@pytest.fixture
def dist(tmp_path, source):
    to_dist(source, tmp_path / "dist", verify=False)
    return tmp_path / "dist"


def refused(dist, source, code, *, trusted=True):
    target = dist.parent / "never"
    with pytest.raises(DataError) as caught:
        dist_to_hf(dist, target, source, bridge_of, How(trusted=trusted))
    assert caught.value.code == code, caught.value
    assert not target.exists()
    return str(caught.value)


def unlisted(dist):
    """As if slime had not written it."""
    (dist / "release" / "MANIFEST.json").unlink()


def test_metadata_that_slime_did_not_write_needs_a_word(tmp_path, dist, source):
    unlisted(dist)
    assert "--trust-metadata" in refused(dist, source, "TOK203", trusted=False)
    same(back(dist, tmp_path / "again", source, trusted=True), tensors_of())


def test_metadata_is_compared_with_the_manifest_first(dist, source):
    (dist / "release" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    said = refused(dist, source, "TOK201")
    assert hashlib.sha256((dist / "release" / ".metadata").read_bytes()).hexdigest() in said


class Run:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_malicious_checkpoint_runs_nothing_even_when_it_is_trusted(tmp_path, dist, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unlisted(dist)
    (dist / "release" / ".metadata").write_bytes(pickle.dumps(Run()))
    assert "posix.system" in refused(dist, source, "TOK203")
    assert not (tmp_path / "ran").exists()


def test_a_malicious_record_within_a_part_runs_nothing(tmp_path, dist, source, monkeypatch):
    """A chunk whose own pickle was exchanged for one of the same length."""
    monkeypatch.chdir(tmp_path)
    file = dist / "release" / "__0_0.distcp"
    data = file.read_bytes()
    name, evil = b"ctorch._utils\n_rebuild_tensor_v2\n", b"cposix\nsystem\n"
    assert name in data
    file.write_bytes(data.replace(name, evil + b"0N" * 8 + b"N" * (len(name) - len(evil) - 16)))
    with pytest.raises(DataError) as caught:
        dist_to_hf(dist, tmp_path / "never", source, bridge_of, How(workers=1))
    assert caught.value.code in ("TOK203", "TOK201")
    assert not (tmp_path / "ran").exists()


def test_a_part_that_was_cut_short_is_told_with_numbers(dist, source):
    file = dist / "release" / "__0_1.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 10)
    said = refused(dist, source, "TOK201")
    assert f"it has {size - 10} bytes" in said
    assert f"ends at byte {size}" in said


def test_a_part_that_is_gone_is_named(dist, source):
    (dist / "release" / "__0_1.distcp").unlink()
    assert "__0_1.distcp, which is not there" in refused(dist, source, "TOK201")


def test_without_metadata_no_layout_can_be_read(dist, source):
    (dist / "release" / ".metadata").unlink()
    assert "which bytes belong to which tensor" in refused(dist, source, "TOK201")
    (dist / "release" / "metadata.json").unlink()
    assert "take the checkpoint before it" in refused(dist / "release", source, "TOK201")


def test_a_save_that_did_not_end_is_told(dist, source):
    (dist / "release" / "metadata.json").unlink()
    assert "which a save writes last" in refused(dist, source, "TOK201")


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_another_format_is_refused_with_what_would_work(dist, source, backend):
    (dist / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    said = refused(dist, source, "TOK202")
    assert backend in said
    assert "--ckpt-format torch_dist" in said


def test_files_of_one_layouts_ranks_are_refused_with_what_would_work(tmp_path, source):
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    said = refused(tmp_path / "old", source, "TOK202")
    assert "only that layout" in said
    assert "--ckpt-format torch_dist" in said


def test_a_folder_is_found_through_the_tracker_the_trainers_folder_and_directly(tmp_path, dist):
    assert DistFolder.open(dist).path == dist / "release"
    shutil.move(dist / "release", dist / "iter_0000012")
    (dist / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert DistFolder.open(dist).path == dist / "iter_0000012"
    assert DistFolder.open(dist / "iter_0000012").path == dist / "iter_0000012"
    shutil.copytree(dist / "iter_0000012", tmp_path / "step-3" / "trainer")
    assert DistFolder.open(tmp_path / "step-3").path == tmp_path / "step-3" / "trainer"


@pytest.mark.parametrize("path", ["", "nothing"])
def test_what_is_no_checkpoint_is_told(tmp_path, path):
    with pytest.raises(DataError, match="TOK201"):
        DistFolder.open(tmp_path / path)


def rewrite(dist, change):
    """Change the metadata of a folder."""
    from slime_core.weights.unpickle import read_metadata

    file = dist / "release" / ".metadata"
    held = read_metadata(file.read_bytes(), "f")
    change(held)
    file.write_bytes(pickle.dumps(held))
    unlisted(dist)


def test_a_tensor_whose_parts_do_not_fill_it_is_told(dist, source):
    rewrite(dist, lambda held: held.state_dict_metadata["output_layer.weight"].chunks.pop())
    assert "the parts of output_layer.weight hold" in refused(dist, source, "TOK201")


def test_numbers_that_are_none_are_damage(dist, source):
    def change(held):
        next(info for index, info in held.storage_data.items() if index.fqn == "output_layer.weight").offset = "0"

    rewrite(dist, change)
    assert "its values are none of a checkpoint's" in refused(dist, source, "TOK201")


def test_a_part_outside_the_folder_is_refused(dist, source):
    def change(held):
        next(
            info for index, info in held.storage_data.items() if index.fqn == "output_layer.weight"
        ).relative_path = "../x"

    rewrite(dist, change)
    assert "../x" in refused(dist, source, "TOK201")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "decoder.layers.mlp.linear_fc2.weight is [3, 16, 24] in the folder, [2, 16, 24]"),
        (
            {"intermediate_size": 23},
            "decoder.layers.mlp.linear_fc1.weight is [48, 16] in the folder, [46, 16] in the model",
        ),
        ({"vocab_size": 129}, "embedding.word_embeddings.weight is [128, 16] in the folder, [129, 16] in the model"),
        ({"tie_word_embeddings": True}, "1 not in the model: output_layer.weight"),
    ],
    ids=["layers", "shape", "vocabulary", "extra"],
)
def test_a_checkpoint_of_another_model_is_refused_by_names_and_numbers(tmp_path, dist, changes, said):
    other = write_folder(tmp_path / "other", tensors_of(), **changes)
    assert said in refused(dist, other, "TOK46")


def test_an_untied_model_needs_an_output_matrix(tmp_path, source):
    tied = write_folder(tmp_path / "tied", tie_word_embeddings=True)
    to_dist(tied, tmp_path / "dist")
    assert "1 missing: output_layer.weight" in refused(tmp_path / "dist", source, "TOK46")


def test_optimizer_state_and_a_runs_other_models_are_left_out(tmp_path, dist, source):
    def change(held):
        megatrons = ("optimizer.state.exp_avg.", "chained_0.optimizer.state.fp32_param.")
        for prefix in (*megatrons, "reference.", "critic.", "critic.optimizer.state.exp_avg."):
            held.state_dict_metadata[prefix + "x"] = held.state_dict_metadata["decoder.final_layernorm.weight"]
            for index, info in list(held.storage_data.items()):
                if index.fqn == "decoder.final_layernorm.weight":
                    held.storage_data[replace(index, fqn=prefix + "x")] = info

    rewrite(dist, change)
    same(back(dist, tmp_path / "again", source, trusted=True), tensors_of())


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
