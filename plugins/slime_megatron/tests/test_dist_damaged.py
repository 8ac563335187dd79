"""torch_dist folders that are damaged, foreign, malicious or of another model: refused with names and numbers."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
from small_family import back, bridge_of, same, tensors_of, to_dist, write_folder

from slime_convert.folder_writing import How
from slime_core.errors import DataError
from slime_megatron.convert.conversion import dist_to_hf
from slime_megatron.convert.dist import DistFolder

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def dist(tmp_path, source):
    to_dist(source, tmp_path / "dist", verify=False)
    return tmp_path / "dist"


def refused(dist, source, code, *, trusted=True):
    target = dist.parent / "never"
    with pytest.raises(DataError) as caught:
        dist_to_hf(dist, target, source, bridge_of, How(), trusted=trusted)
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
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, path):
    with pytest.raises(DataError, match="TOK201"):
        DistFolder.open(tmp_path / path)


def rewrite(dist, change):
    """Change the metadata of a folder."""
    from slime_megatron.convert.unpickle import read_metadata

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
