"""The bytes that SGLang unpickles, written by opcode, and the memory that other processes read."""

import io
import json
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from travelling import QK, sent, tensors_of

from slime_core.types import WeightRoute
from slime_core.weights import hashing
from slime_sglang.senders import tensor

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


class Reader(pickle.Unpickler):
    """Stands where SGLang's unpickler stands: its classes by name, torch's as they are."""

    def find_class(self, module, name):
        if module.startswith("sglang"):
            return type(name, (), {"__module__": module})
        return super().find_class(module, name)


def read(data):
    return Reader(io.BytesIO(data)).load()


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -1, 127, 128, 255, 256, -129, 1 << 40, -(1 << 63), "", "Größe \u2603", b"", b"\x00\xff",
     (), (1, "a"), [], [[1], [None]], {}, {"a": (1, {"b": []})}, torch.bfloat16, torch.uint8, torch.Size([3, 4]),
     torch.Tensor, torch.UntypedStorage],
    ids=repr,
)  # fmt: skip
def test_a_value_written_by_opcode_is_read_back_with_its_type(value):
    found = read(tensor.dumped({"value": value}))["value"]
    assert found == value
    assert type(found) is type(value)


def test_an_object_of_another_installation_is_written_by_name_and_others_are_refused():
    found = read(tensor.dumped([tensor.Made("sglang.srt.weight_sync.tensor_bucket", "Row", {"name": "x", "n": 3})]))
    assert (type(found[0]).__module__, type(found[0]).__name__) == ("sglang.srt.weight_sync.tensor_bucket", "Row")
    assert vars(found[0]) == {"name": "x", "n": 3}
    with pytest.raises(TypeError, match="a set is not part"):
        tensor.dumped({1, 2})


OTHER = """
import base64, pickle, io, sys, torch
class Row: pass
class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return Row if name == "FlattenedTensorMetadata" else super().find_class(module, name)
torch.multiprocessing.set_sharing_strategy("file_system")
for line in sys.stdin:
    got = Reader(io.BytesIO(base64.b64decode(line))).load()
    for row in got["metadata"]:
        assert row.end_idx - row.start_idx == row.numel
        view = got["flattened_tensor"][row.start_idx : row.end_idx].view(row.dtype).reshape(row.shape)
        print(row.name, view.float().flatten().tolist(), flush=True)
    del got, view  # as SGLang does: the next update opens the memory anew
    print("end", flush=True)
"""


def test_another_process_reads_each_update_through_the_same_handle(torch_python):
    """The memory is shared, so the second update is there without a new handle."""
    other = subprocess.Popen([*torch_python, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    sender, handles = tensor.TensorSender(CPU), []
    route = WeightRoute(transport="tensor", dtype="bfloat16", checks=(QK,))
    try:
        for seed in (0, 1, 2):
            tensors = tensors_of(seed)
            handle, fingerprints = sent(sender, tensors, route)
            (bucket,) = handle["buckets"]
            handles.append(bucket["handle"])
            print(bucket["handle"], file=other.stdin, flush=True)
            lines = dict(line.split(" ", 1) for line in iter(other.stdout.readline, "end\n"))
            cast = {name: t.bfloat16() for name, t in tensors.items()}
            assert {n: json.loads(v) for n, v in lines.items()} == {
                n: t.float().flatten().tolist() for n, t in cast.items()
            }
            assert fingerprints == hashing.expected(cast, (QK,), torch.bfloat16)
            assert bucket["names"] == list(tensors)
            assert bucket["dtypes"] == ["bfloat16"] * 5
            assert bucket["shapes"] == [list(t.shape) for t in tensors.values()]
        assert handles[0] == handles[1]
        names = sender._names
        assert sent(sender, tensors, route)[0]["buckets"][0]["handle"] == handles[0]
        sender.drop()
        assert not any(Path(f"/dev/shm{name}").exists() for name in names)
        assert sent(sender, tensors, route)[0]["buckets"][0]["handle"] != handles[0]
        sender.drop()
    finally:
        other.communicate(timeout=60)
    assert other.returncode == 0
