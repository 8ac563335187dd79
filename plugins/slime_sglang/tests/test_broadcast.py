"""A group of the trainer and of servers' ranks, over gloo: bytes arrive whole, and a failure of one side ends both."""

import json
import socket
import subprocess
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from travelling import QK, TOP, sent, tensors_of

from slime_core.errors import TrainerError
from slime_core.types import WeightRoute
from slime_core.weights import hashing
from slime_sglang.senders import nccl

pytestmark = pytest.mark.integration

PATIENCE = 60.0
PEER = """
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as inner

DEVICE = torch.device(os.environ.get("SLIME_PEER_DEVICE", "cpu"))


def join(handle, rank):
    # what `init_custom_process_group` of SGLang does
    limit = timedelta(seconds=60)
    store, rank, world = next(dist.rendezvous(f"tcp://{handle['address']}", rank, handle["world"], timeout=limit))
    store.set_timeout(limit)
    store = inner.PrefixStore(handle["group"], store)
    backend = inner.Backend(handle["backend"])
    group, _ = inner._new_process_group_helper(
        world, rank, [], backend, store, group_name=handle["group"], timeout=limit
    )
    inner._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return group


def receive(group, bucket):
    # `flattened_bucket` of SGLang, of one broadcast
    sizes = [(torch.Size(shape), getattr(torch, dtype)) for shape, dtype in zip(bucket["shapes"], bucket["dtypes"])]
    total = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
    flat = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    dist.broadcast(flat, src=0, group=group)
    found, place = {}, 0
    for name, (shape, dtype) in zip(bucket["names"], sizes):
        end = place + shape.numel() * dtype.itemsize
        found[name] = flat[place:end].view(dtype).reshape(shape).cpu().clone()
        place = end
    return found


group = None
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
for line in sys.stdin:
    word, handle, *more = json.loads(line)
    if word == "join":
        group = join(handle, more[0])
    elif word == "take":
        taken = {}
        for bucket in handle["buckets"]:
            taken |= receive(group, bucket)
        save_file(taken, os.path.join(more[0], f"taken-{handle['number']}.safetensors"))
    else:
        receive(group, handle["buckets"][0])
    print(word, flush=True)
"""
"""A server's rank: joins a group with torch's own means, as SGLang does, and receives what it is told to.

Each line of stdin is a call and its answer a line of stdout:  join HANDLE RANK | take HANDLE FOLDER | half HANDLE
"""


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", next(name for _, name in socket.if_nameindex() if name.startswith("lo")))


class Peer:
    """`PEER` in a process of its own."""

    def __init__(self, python):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([*python, "-c", PEER], text=True, **pipes)

    def tell(self, *call):
        print(json.dumps(call), file=self.process.stdin, flush=True)

    def answer(self):
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def peer(torch_python):
    """A rank that joins one group after another."""
    one = Peer(torch_python)
    yield one
    one.process.kill()
    one.process.communicate()


def route(group="one", world=2, timeout=PATIENCE, **more):
    return WeightRoute(
        transport="nccl", dtype="bfloat16", buffer_bytes=600, address="127.0.0.1:0", world=world, group=group,
        timeout=timeout, **more,
    )  # fmt: skip


def ended(sender):
    """The transfer's error, when it is over."""
    transfer = sender._transfer
    assert transfer.done.wait(PATIENCE)
    return transfer.error


def said(handle):
    """What a server finds in the store."""
    store = nccl.open_store(handle["address"], timeout=5)
    return nccl.failure_reason(store, nccl.failure_key(handle["group"], handle["number"]))


def test_ranks_that_join_as_sglang_does_receive_every_update_bit_for_bit(peer, tmp_path):
    sender = nccl.BroadcastSender(torch.device("cpu"))
    known = dict(dist.distributed_c10d._world.pg_names)
    for number in (1, 2):
        tensors = tensors_of(number)
        handle, fingerprints = sent(sender, tensors, route(checks=(QK, TOP)), version=number)
        assert (handle["number"], handle["join"]) == (number, number == 1)
        assert (handle["group"], handle["world"], handle["backend"]) == ("one", 2, "gloo")
        assert len(handle["buckets"]) == 3
        if handle["join"]:
            peer.tell("join", handle, 1)
        peer.tell("take", handle, str(tmp_path))
        assert ended(sender) == ""
        assert [peer.answer() for _ in range(2 if handle["join"] else 1)][-1] == "take"
        taken = load_file(str(tmp_path / f"taken-{number}.safetensors"))
        assert taken.keys() == tensors.keys()
        cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        assert all(torch.equal(taken[name], tensor) for name, tensor in cast.items())
        assert fingerprints == hashing.expected(cast, (QK, TOP), torch.bfloat16)
    assert dist.distributed_c10d._world.pg_names == known  # the process's own groups know nothing of it


def test_a_publish_returns_before_any_server_has_joined_and_leaves_no_thread(peer, tmp_path):
    before = set(threading.enumerate())
    sender = nccl.BroadcastSender(torch.device("cpu"))
    handle, _ = sent(sender, tensors_of(), route(group="early"))
    assert not sender._transfer.done.is_set()
    peer.tell("join", handle, 1)
    peer.tell("take", handle, str(tmp_path))
    assert ended(sender) == ""
    assert [peer.answer(), peer.answer()] == ["join", "take"]
    sender.drop()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_server_that_never_joins_ends_the_transfer_at_the_deadline_with_a_word_for_the_others():
    sender = nccl.BroadcastSender(torch.device("cpu"))
    handle, _ = sent(sender, tensors_of(), route(timeout=0.5))
    assert "in time" in ended(sender)
    assert "trainer rank 0" in said(handle)


def test_a_server_that_gives_up_ends_the_transfer_at_once():
    """What the server's side writes into the store is the error here."""
    sender = nccl.BroadcastSender(torch.device("cpu"))
    handle, _ = sent(sender, tensors_of(), route())
    store = nccl.open_store(handle["address"], timeout=5)
    begun = time.monotonic()
    nccl.tell(store, nccl.failure_key(handle["group"], handle["number"]), "server 3: it refused")
    assert ended(sender) == "server 3: it refused"
    assert time.monotonic() - begun < PATIENCE / 2  # not the deadline
    nccl.tell(store, nccl.failure_key(handle["group"], handle["number"]), "somebody later")
    assert said(handle) == "server 3: it refused"


def test_a_server_that_dies_between_buckets_is_told_to_all_and_its_group_is_not_used_again(
    peer, tmp_path, torch_python
):
    """A partial bucket: the first of three has arrived."""
    sender, victim = nccl.BroadcastSender(torch.device("cpu")), Peer(torch_python)
    handle, _ = sent(sender, tensors_of(), route())
    victim.tell("join", handle, 1)
    victim.tell("half", handle)
    assert [victim.answer(), victim.answer()] == ["join", "half"]
    assert not sender._transfer.done.is_set()
    victim.process.kill()
    victim.process.communicate()
    error = ended(sender)
    assert error.startswith("trainer rank 0: ")
    assert said(handle) == error
    with pytest.raises(TrainerError, match="the process group one is broken"):
        sent(sender, tensors_of(), route())
    handle, _ = sent(sender, tensors_of(), route(group="two"))
    assert (handle["join"], handle["number"]) == (True, 1)
    peer.tell("join", handle, 1)
    peer.tell("take", handle, str(tmp_path))
    assert ended(sender) == ""
    assert [peer.answer(), peer.answer()] == ["join", "take"]


def settled():
    """Wait for the threads of a sender, but the one of a transfer under way."""
    for thread in threading.enumerate():
        if thread.name == "weights" and getattr(thread, "_target", None) is nccl._destroy:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def joined(sender, peer, tmp_path, group):
    """One update over a group that the peer joins; a weak reference to what this side has of it."""
    handle, _ = sent(sender, tensors_of(), route(group=group))
    peer.tell("join", handle, 1)
    peer.tell("take", handle, str(tmp_path))
    assert ended(sender) == ""
    assert [peer.answer(), peer.answer()] == ["join", "take"]
    return weakref.ref(sender._group.process_group)


def test_the_group_before_is_destroyed_when_the_servers_change(peer, tmp_path):
    sender = nccl.BroadcastSender(torch.device("cpu"))
    groups = [joined(sender, peer, tmp_path, group) for group in ("first", "second", "third")]
    settled()
    assert [one() is None for one in groups] == [True, True, False]


def test_a_group_whose_peer_died_is_destroyed_too(peer, tmp_path, torch_python):
    """Nothing of it stays until the end of the run."""
    sender, victim = nccl.BroadcastSender(torch.device("cpu")), Peer(torch_python)
    broken = joined(sender, victim, tmp_path, "of the dead")
    victim.process.kill()
    victim.process.communicate()
    handle, _ = sent(sender, tensors_of(), route(group="of the dead"))
    assert not handle["join"]
    assert ended(sender)
    joined(sender, peer, tmp_path, "of the living")
    settled()
    assert broken() is None


def test_an_address_that_is_taken_is_an_error_that_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sender = nccl.BroadcastSender(torch.device("cpu"))
        with pytest.raises(TrainerError) as error:
            sent(sender, tensors_of(), WeightRoute(transport="nccl", dtype="bfloat16", address=address, world=2))
    assert error.value.where == address


def test_the_store_listens_at_its_address_alone():
    sender = nccl.BroadcastSender(torch.device("cpu"))
    handle, _ = sent(sender, tensors_of(), route(timeout=0.2))
    port = int(handle["address"].rpartition(":")[2])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    ]
    assert listening == [f"0100007F:{port:04X}"]
    ended(sender)
