"""Weights through a sealed block of anonymous memory: the bits arrive, once a tensor, and nothing is left behind."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from slime_core.engines.local.twin import fingerprint
from slime_core.errors import EngineError
from slime_core.weights.shared_memory import MappedBlock, SharedBlock, checksums

pytestmark = pytest.mark.unit


@pytest.fixture
def block():
    made = SharedBlock()
    yield made
    made.close()


def _map(block, listing):
    return MappedBlock(os.dup(block.fd), listing)


def _tensors():
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    return {
        "embed": weight,
        "half": torch.randn(3, 3).bfloat16(),
        "turned": torch.randn(4, 6).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(5),
        "head": weight,
    }


def test_every_tensor_arrives_with_its_dtype_shape_and_bits(block):
    tensors = _tensors()
    listing = block.fill(tensors)
    found = _map(block, listing).tensors(listing)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    assert {row[0]: row[-1] for row in listing["tensors"]} == {n: fingerprint(t) for n, t in tensors.items()}
    assert set(checksums(listing, "float32")) == {"embed", "turned", "scalar", "empty", "head"}


def test_tied_names_lie_in_one_place_and_different_views_do_not(block):
    tensors = _tensors()
    tensors["part"] = tensors["embed"][:2]
    places = {row[0]: row[3] for row in block.fill(tensors)["tensors"]}
    assert places["embed"] == places["head"]
    assert len(set(places.values())) == len(places) - 1


def test_a_block_is_filled_again_in_place_and_made_anew_only_where_more_is_needed(block):
    tensors = _tensors()
    first = block.fill(tensors)
    reader = _map(block, first)
    for name in ("embed", "half", "ids"):
        tensors[name].add_(1)
    second = block.fill(tensors)
    assert (second["block"], second["size"]) == (first["block"], first["size"])
    assert torch.equal(reader.tensors(second)["half"], tensors["half"])
    third = block.fill({**tensors, "more": torch.zeros(10_000)})
    assert third["block"] == first["block"] + 1
    assert torch.equal(_map(block, third).tensors(third)["turned"], tensors["turned"])


def test_bytes_that_differ_from_the_listing_are_named(block):
    listing = block.fill(_tensors())
    reader = _map(block, listing)
    place = next(row[3] for row in listing["tensors"] if row[0] == "half")
    os.pwrite(block.fd, b"\xff", place + 1)
    with pytest.raises(EngineError, match="ENG83 1 tensors arrived with other bytes than the trainer's: half"):
        reader.tensors(listing)


def test_the_size_is_sealed_so_a_reader_is_never_cut_off(block):
    block.fill(_tensors())
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 1 << 20)


def test_a_descriptor_that_is_no_sealed_block_is_refused_and_closed(block, tmp_path):
    listing = block.fill(_tensors())
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, listing["size"])
    with pytest.raises(EngineError, match="not whole"):
        MappedBlock(fd, listing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_is_not_there_is_an_error_with_a_fix(block, monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="ENG86 no 0 MiB of shared memory") as caught:
        block.fill(_tensors())
    assert "--max-staleness 0" in caught.value.fix
    assert block.fd == -1


SIDE = """
import os, signal, socket, sys
import torch
from slime_core.weights.shared_memory import MappedBlock, SharedBlock

channel = socket.socket(fileno=0)
if sys.argv[1] == "writer":
    block = SharedBlock()
    block.fill({"w": torch.ones(1 << 18)})
    socket.send_fds(channel, [b"w"], [block.fd])
else:
    _, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
    size = os.fstat(fd).st_size
    reader = MappedBlock(fd, {"block": 1, "size": size})
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("killed", ["writer", "reader"])
def test_after_a_sigkill_of_either_side_no_name_of_the_block_is_left(killed, torch_python):
    """The block has no name to begin with; when both are gone the kernel has freed it."""
    ends = socket.socketpair()
    processes, pids = {}, {}
    for side, end in zip(("writer", "reader"), ends):
        with end:
            processes[side] = subprocess.Popen([*torch_python, "-c", SIDE, side], stdin=end, stdout=subprocess.PIPE)
    for side, process in processes.items():
        pids[side] = int(process.stdout.readline())
    assert all(line.endswith("/memfd:slime-weights (deleted)") for line in _mapped(pids["reader"]))
    other = "reader" if killed == "writer" else "writer"
    os.kill(pids[killed], signal.SIGKILL)
    assert processes[killed].wait() == -signal.SIGKILL
    assert _mapped(pids[other]), "the other side lost it"
    os.kill(pids[other], signal.SIGKILL)
    processes[other].wait()
    assert not [name for name in os.listdir("/dev/shm") if "slime-weights" in name]
    for process in processes.values():
        process.stdout.close()


def _mapped(pid):
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "slime-weights" in line]
