"""Safetensors files, sound and damaged: an error names the file and what is wrong, and nothing crashes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from slime_core.errors import DataError
from slime_core.weights.folder import ModelFolder
from slime_core.weights.shards import Shards, read_header

pytestmark = pytest.mark.unit


def file_of(header, data, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


SOUND = {"a": entry(0, 8), "b": entry(8, 16)}
DAMAGE = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": file_of(SOUND, b"\0" * 16, length=10_000),
    "header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "header cut short": file_of(SOUND, b"")[:20],
    "header not JSON": file_of(b"{nope", b""),
    "header not UTF-8": file_of(b'{"\xff": 1}', b""),
    "header a list": file_of([1], b""),
    "header nested": file_of(b"[" * 200_000, b""),
    "a name twice": file_of(b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 8)).encode(),) * 2), b"\0" * 8),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
    "three offsets": file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, b"\0" * 8),
    "negative offset": file_of({"a": entry(-8, 0)}, b"\0" * 8),
    "negative dimension": file_of({"a": entry(0, 8, (-2,))}, b"\0" * 8),
    "dimension a float": file_of({"a": entry(0, 8, (2.0,))}, b"\0" * 8),
    "size against shape": file_of({"a": entry(0, 8, (3,))}, b"\0" * 8),
    "tensors cut short": file_of(SOUND, b"\0" * 12),
    "tensors overlap": file_of({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12),
    "a gap": file_of({"a": entry(0, 8), "b": entry(12, 20)}, b"\0" * 20),
    "bytes left over": file_of(SOUND, b"\0" * 20),
}


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_typed_error(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        Shards.open(tmp_path)
    assert caught.value.code == "TOK47"
    assert caught.value.where == str(path)
    assert caught.value.why
    assert "again" in caught.value.fix


def test_a_model_folder_with_a_truncated_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="cut short") as caught:
        ModelFolder.open(folder)
    assert caught.value.code == "TOK47"


def test_a_file_cut_short_while_in_use_is_an_error_and_no_crash(folder):
    opened = ModelFolder.open(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])
    with pytest.raises(DataError) as caught:
        opened.build_model()
    assert caught.value.code == "TOK47"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_no_single_changed_byte_or_cut_raises_anything_else(tmp_path, place, byte, cut):
    data = bytearray(file_of(SOUND, bytes(range(16))))
    data[place % len(data)] = byte
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(data[: len(data) - cut]))
    codes = []
    try:
        shards = Shards.open(tmp_path)
        assert all(shards[name].numel() >= 0 for name in shards)
    except DataError as error:
        codes.append(error.code)
    assert codes in ([], ["TOK47"], ["TOK48"])


@pytest.mark.parametrize("dtype", ["F8_E5M2", "U64", "F4", "nonsense"])
def test_a_dtype_that_does_not_load_is_named(tmp_path, dtype):
    (tmp_path / "model.safetensors").write_bytes(file_of({"a": entry(0, 2, dtype=dtype)}, b"\0" * 2))
    with pytest.raises(DataError, match=dtype) as caught:
        Shards.open(tmp_path)
    assert caught.value.code == "TOK48"
    assert "bfloat16" in caught.value.fix


def test_every_dtype_reads_as_safetensors_wrote_it(tmp_path):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (3, 4, 8), generator=generator, dtype=torch.uint8)
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
    tensors = {str(kind): bits.view(kind).clone() for kind in kinds}
    tensors |= {"bool": bits > 9, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = Shards.open(tmp_path)
    assert set(shards) == set(tensors)
    for name, tensor in tensors.items():
        assert shards[name].dtype == tensor.dtype
        assert shards[name].shape == tensor.shape
        read, wrote = (t.reshape(-1).view(torch.uint8).numpy() for t in (shards[name], tensor))
        assert np.array_equal(read, wrote)


def test_a_tensor_is_read_when_it_is_asked_for(folder):
    before = Shards.open(folder)
    name = "model.norm.weight"
    info = read_header(folder / "model.safetensors")[name]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(info.begin)
        file.write(np.float32(7).tobytes())
    assert before[name][0] == 7


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_found_through_their_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    shards = Shards.open(tmp_path)
    assert shards["a"].tolist() == [1, 1]
    assert shards["b"].tolist() == [0, 0, 0]


def test_a_missing_shard_lists_what_went_with_it(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(DataError, match=r"2 tensors are missing with the shard two.safetensors: b, c") as caught:
        Shards.open(tmp_path)
    assert caught.value.code == "TOK46"


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(DataError, match="not in the shards that the index names: b") as caught:
        Shards.open(tmp_path)
    assert caught.value.code == "TOK46"


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors"])
def test_an_index_may_not_name_files_elsewhere(tmp_path, name):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model").mkdir()
    index(tmp_path / "model", {"a": name})
    with pytest.raises(DataError, match="not a file name inside the folder") as caught:
        Shards.open(tmp_path / "model")
    assert caught.value.code == "TOK47"


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"], ids=["empty", "list", "number", "no map"])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match="weight_map") as caught:
        Shards.open(tmp_path)
    assert caught.value.code == "TOK47"


@pytest.mark.parametrize(
    ("file", "why", "fix"),
    [
        ("pytorch_model.bin", "pickles", "save_pretrained"),
        ("model-Q4.gguf", "quantised", "slime convert gguf-to-hf"),
        ("consolidated.safetensors", "own names", "that transformers loads"),
        ("notes.txt", "no weights", "rollout.init_weights=random"),
    ],
)
def test_weights_in_another_form_are_named_with_the_way_out(tmp_path, file, why, fix):
    (tmp_path / file).write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match="TOK46") as caught:
        Shards.open(tmp_path)
    assert why in caught.value.why
    assert fix in caught.value.fix
