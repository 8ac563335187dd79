"""Pickles of checkpoints: torch's metadata is read, and nothing that another pickle asks for is ever done."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_core.errors import DataError
from slime_megatron.convert.unpickle import read_metadata, read_record

pytestmark = pytest.mark.unit


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


def metadata(**changes):
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    held = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([3]), [chunk])
    found = Metadata({"a": held, "b": BytesStorageMetadata()}, planner_data={}, storage_meta=StorageMeta(Path("/x")))
    found.storage_data = {MetadataIndex("a", [0]): None}
    vars(found).update(changes)
    return found


def test_torchs_metadata_is_read_whole():
    found = read_metadata(pickle.dumps(metadata()), "f")
    assert found.state_dict_metadata["a"].properties.dtype == torch.bfloat16
    assert found.state_dict_metadata["a"].chunks[0].sizes == (3,)
    assert MetadataIndex("a", [0]) in found.storage_data


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "evil",
    [
        lambda p: Call(os.system, f"touch {p}"),
        lambda p: Call(eval, f"open({str(p)!r}, 'w')"),
        lambda p: Call(getattr, Path(p), "touch"),
        lambda p: Call(torch.load, str(p)),
        lambda p: Call(__import__, "antigravity"),
    ],
    ids=["system", "eval", "getattr", "torch.load", "import"],
)
def test_a_malicious_pickle_is_refused_by_name_and_runs_nothing(tmp_path, evil, protocol):
    target = tmp_path / "ran"
    data = pickle.dumps(metadata(planner_data={"x": evil(target)}), protocol)
    with pytest.raises(DataError) as caught:
        read_metadata(data, "folder/.metadata")
    assert caught.value.code == "TOK203"
    assert "nothing of this one was run" in caught.value.why
    assert not target.exists()


def test_a_malicious_record_of_a_tensor_is_refused(tmp_path):
    with pytest.raises(DataError, match="TOK203"):
        read_record(pickle.dumps(Call(os.system, f"touch {tmp_path / 'ran'}")), "f")
    assert not (tmp_path / "ran").exists()


def test_attributes_of_allowed_modules_are_not_reached():
    """`torch.distributed.checkpoint.metadata` has `os`: with protocol 4 a name may have dots."""
    text = b"\x80\x04\x8c\x29torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    text = text.replace(b"\x29", bytes([len("torch.distributed.checkpoint.metadata")]), 1)
    with pytest.raises(DataError, match="TOK203"):
        read_metadata(text, "f")


def test_classes_of_megatrons_metadata_become_nothing():
    text = pickle.dumps(metadata(all_local_plans=[]), 2)
    name = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    text = text.replace(b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n", name)
    found = read_metadata(text, "f")
    assert type(found.state_dict_metadata["b"]).__name__ == "Inert"


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(metadata())[:-20]])
def test_a_file_that_is_no_metadata_is_damage(data):
    with pytest.raises(DataError, match="TOK201"):
        read_metadata(data, "f")


def test_the_record_of_torchs_own_archive_is_read():
    data = io.BytesIO()
    torch.save(torch.randn(4, 6)[1:3], data)
    with zipfile.ZipFile(data) as packed:
        record = read_record(packed.read("archive/data.pkl"), "f")
    assert (record.offset, record.shape, record.stride, record.dtype) == (6, (2, 6), (6, 1), torch.float32)
