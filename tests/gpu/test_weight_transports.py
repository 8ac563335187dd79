"""Weights leaving a GPU: another process reads them through a CUDA IPC handle, a folder holds them, NCCL carries them.

No SGLang is needed: its side is played by processes that do what it does, with torch alone. Two GPUs: the broadcast.
"""

import base64
import gc
import json
import os
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_broadcast import PEER
from travelling import QK, TOP, sent, tensors_of

from slime_core.types import WeightRoute
from slime_core.weights.transports import disk
from slime_sglang import hashing
from slime_sglang.senders import nccl, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

READER = """
import base64, io, json, pickle, sys, torch
from torch.multiprocessing import reductions
DEVICE = 6
class Row: pass
def rebuild(*args):
    found = [n for n in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(n).uuid) == args[DEVICE]]
    return reductions.rebuild_cuda_tensor(*args[:DEVICE], found[0], *args[DEVICE + 1 :])
class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        known = {"FlattenedTensorMetadata": Row, "_rebuild_cuda_tensor_modified": rebuild}
        return known[name] if module.startswith("sglang.") else super().find_class(module, name)
torch.cuda.init()
for line in sys.stdin:
    got = Reader(io.BytesIO(base64.b64decode(line))).load()
    flat = got["flattened_tensor"]
    assert flat.is_cuda
    found = {r.name: flat[r.start_idx : r.end_idx].view(r.dtype).reshape(r.shape).float().flatten().tolist()
             for r in got["metadata"]}
    torch.cuda.synchronize()
    del got, flat
    print(json.dumps(found), flush=True)
"""


def on(device, seed):
    return {name: value.to(device) for name, value in tensors_of(seed).items()}


def cast(seed):
    return {name: value.bfloat16() for name, value in tensors_of(seed).items()}


def test_another_process_reads_each_update_through_the_same_handle():
    """As SGLang does: the device by its uuid, the memory opened anew at every update."""
    device = torch.device("cuda", 0)
    other = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    sender, handles = tensor.TensorSender(device), []
    route = WeightRoute(transport="tensor", dtype="bfloat16", checksum="murmur", checks=(QK, TOP))
    try:
        for seed in range(4):
            handle, fingerprints = sent(sender, on(device, seed), route, sums=hashing.Murmur)
            (bucket,) = handle["buckets"]
            handles.append(bucket["handle"])
            print(bucket["handle"], file=other.stdin, flush=True)
            found = json.loads(other.stdout.readline())
            assert found == {name: value.float().flatten().tolist() for name, value in cast(seed).items()}
            assert fingerprints == hashing.expected(cast(seed), (QK, TOP), torch.bfloat16, "murmur")
        assert len(set(handles)) == 1
        held = torch.cuda.memory_allocated(device)
        gc.collect()  # else torch may free at this moment what tests before left, or not yet
        sender.drop()
        freed = held - torch.cuda.memory_allocated(device)
        assert freed > 0, [(block["size"], block["state"]) for block in torch.cuda.memory_snapshot()[0]["blocks"]][:20]
        assert sent(sender, on(device, 9), route)[0]["buckets"][0]["handle"]
    finally:
        other.communicate(timeout=60)
    assert other.returncode == 0


def test_the_handle_names_the_gpu_by_its_uuid_and_only_classes_that_sglang_allows():
    """The names are those of the allow-list of SGLang 0.5.23, the stricter of the two."""
    handle, _ = sent(
        tensor.TensorSender(torch.device("cuda", 0)),
        on("cuda:0", 0),
        WeightRoute(transport="tensor", dtype="bfloat16"),
    )
    data = base64.b64decode(handle["buckets"][0]["handle"])
    texts, names = [], set()
    for code, argument, _ in pickletools.genops(data):
        if code.name == "BINUNICODE":
            texts.append(argument)
        elif code.name == "STACK_GLOBAL":
            names.add(tuple(texts[-2:]))
    assert str(torch.cuda.get_device_properties(0).uuid) in texts
    assert names <= {
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch", "uint8"),
        ("torch", "bfloat16"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
    }


def test_a_buffer_that_does_not_fit_names_the_keys_to_turn():
    from slime_core.errors import TrainerError

    with pytest.raises(TrainerError) as error:
        tensor.TensorSender(torch.device("cuda", 0))._allocate(1 << 42)
    assert error.value.code == "TRN96"
    assert "mem_fraction_static" in error.value.fix


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_a_folder_holds_what_lay_on_the_gpu(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(disk, "PIECE", piece)  # more pieces than locked buffers
    sender = disk.DiskSender(torch.device("cuda", 0), {})
    for seed in (0, 1):
        route = WeightRoute(
            transport="disk", dtype="bfloat16", folder=str(tmp_path), checksum="murmur", checks=(QK, TOP)
        )
        handle, fingerprints = sent(sender, on("cuda:0", seed), route, seed, hashing.Murmur)
        stored = load_file(str(Path(handle["folder"]) / "model.safetensors"))
        assert stored.keys() == cast(seed).keys()
        assert all(torch.equal(stored[name], value) for name, value in cast(seed).items())
        assert fingerprints == hashing.expected(cast(seed), (QK, TOP), torch.bfloat16, "murmur")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not proven: needs two GPUs")
@pytest.mark.parametrize("fits", [True, False], ids=["staged_on_the_gpu", "staged_in_host_memory"])
def test_a_rank_on_the_other_gpu_receives_every_update(tmp_path, monkeypatch, fits):
    """NCCL between two processes; the peer joins with torch's own means, as SGLang does."""
    if not fits:
        monkeypatch.setattr(nccl, "SPARE", 1 << 50)
    env = {**os.environ, "SLIME_PEER_DEVICE": "cuda:1"}
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def tell(*call):
        print(json.dumps(call), file=peer.stdin, flush=True)

    sender = nccl.BroadcastSender(torch.device("cuda", 0))
    try:
        for number in (1, 2, 3):
            route = WeightRoute(
                transport="nccl", dtype="bfloat16", buffer_bytes=600, address="127.0.0.1:0", world=2, group="gpus",
                timeout=120.0, checksum="murmur", checks=(QK,),
            )  # fmt: skip
            handle, fingerprints = sent(sender, on("cuda:0", number), route, number, hashing.Murmur)
            assert sender._staging.flats[0].is_cuda == fits
            assert handle["backend"] == "nccl"
            if handle["join"]:
                tell("join", handle, 1)
                assert peer.stdout.readline().strip() == "join"
            tell("take", handle, str(tmp_path))
            assert peer.stdout.readline().strip() == "take"
            assert sender._transfer.done.wait(60)
            assert sender._transfer.error == ""
            taken = load_file(str(tmp_path / f"taken-{number}.safetensors"))
            assert all(torch.equal(taken[name], value) for name, value in cast(number).items())
            assert fingerprints == hashing.expected(cast(number), (QK,), torch.bfloat16, "murmur")
    finally:
        peer.kill()
        peer.communicate()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not proven: needs two GPUs")
def test_a_rank_that_dies_in_the_middle_ends_the_broadcast(tmp_path):
    """NCCL itself would wait."""
    env = {**os.environ, "SLIME_PEER_DEVICE": "cuda:1"}
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    sender = nccl.BroadcastSender(torch.device("cuda", 0))
    route = WeightRoute(
        transport="nccl",
        dtype="bfloat16",
        buffer_bytes=600,
        address="127.0.0.1:0",
        world=2,
        group="dies",
        timeout=40.0,
    )
    handle, _ = sent(sender, on("cuda:0", 0), route)
    for call in (["join", handle, 1], ["half", handle]):
        print(json.dumps(call), file=peer.stdin, flush=True)
        assert peer.stdout.readline().strip() == call[0]
    peer.kill()
    peer.communicate()
    store = nccl.open_store(handle["address"], timeout=5)  # the server's client says what it sees
    nccl.tell(store, nccl.failure_key("dies", 1), "server 0: the connection broke")
    assert sender._transfer.done.wait(60)
    error = sender._transfer.error  # none where NCCL had taken all of it into its own buffers: then it is the server's
    assert error in ("", "server 0: the connection broke") or error.startswith("trainer")
    assert torch.ones(4, device="cuda:0").sum().item() == 4  # the GPU goes on
