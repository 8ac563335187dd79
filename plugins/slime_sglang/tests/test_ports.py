"""Ports that nobody else gets between the choice and the server that listens, and who listens on one."""

import asyncio
import os
import socket
import struct
import subprocess
import sys

import pytest

from slime_sglang import held_ports as ports

pytestmark = pytest.mark.unit

IP_LOCAL_PORT_RANGE = 51


def any_port_of(low, high, *, reuse=False, host="127.0.0.1"):
    """A socket that asks the kernel for any free port of these; OSError where none is free."""
    asking = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if reuse:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", low | high << 16))
        asking.bind((host, 0))
        return asking
    except BaseException:
        asking.close()
        raise


@pytest.mark.parametrize("reuse", [False, True], ids=["plain", "reuse"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_held_port_is_given_to_nobody_who_asks_for_any_port(host, reuse):
    """The kernel is asked for a port out of the held one alone, and has none."""
    with ports.hold() as held, pytest.raises(OSError, match="in use"):
        any_port_of(held.port, held.port, reuse=reuse, host=host)


def test_the_same_question_is_answered_once_the_port_is_let_go():
    held = ports.hold()
    held.close()
    with any_port_of(held.port, held.port) as got:
        assert got.getsockname()[1] == held.port


def test_an_outgoing_connection_does_not_get_a_held_port():
    with ports.hold() as held, socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as asking:
        asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", held.port | held.port << 16))
        with pytest.raises(OSError, match="assign"):
            asking.connect(there.getsockname())


def test_a_server_listens_on_a_port_that_we_hold_and_stays_when_we_let_go():
    """As SGLang's uvicorn does: by an event loop's create_server."""

    async def serve():
        held = ports.hold()
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", held.port)
        async with server:
            held.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", held.port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(serve())


def test_torch_meets_on_a_port_that_we_hold():
    """SGLang's --nccl-port is where its ranks find each other, by a TCPStore."""
    from torch.distributed import TCPStore

    with ports.hold() as held:
        store = TCPStore("127.0.0.1", held.port, world_size=1, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_nobody_holds_or_takes_a_held_port_by_its_number_without_sharing():
    with ports.hold() as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.port))


def test_ports_in_a_row_are_all_held():
    with ports.hold(count=16) as held:
        assert held.count == 16
        for port in range(held.port, held.port + 16):
            with pytest.raises(OSError, match="in use"):
                any_port_of(port, port, reuse=True)


def test_a_row_goes_around_a_port_that_somebody_has(monkeypatch):
    """A row that begins before somebody's port is not taken: the next start is tried."""
    real, starts = ports._bound, []
    taken = ports.hold(count=3)
    for free in taken._sockets[:2]:
        free.close()  # the row may begin here, and its third port is somebody's

    def bound(host, port):
        if port == 0:
            starts.append(port)
            return real(host, taken.port) if len(starts) == 1 else real(host, 0)
        return real(host, port)

    monkeypatch.setattr(ports, "_bound", bound)
    with taken, ports.hold(count=3) as held:
        assert len(starts) >= 2
        assert not held.port <= taken.port + 2 < held.port + 3


def test_a_port_may_be_asked_for_below_a_number():
    with ports.hold(highest=45_000) as one, ports.hold(highest=45_000) as other:
        assert one.port != other.port
        assert max(one.port, other.port) <= 45_000


def test_no_port_is_below_the_lowest_number():
    with pytest.raises(OSError, match="free"):
        ports.hold(highest=1)


def test_a_host_that_is_not_of_this_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        ports.hold("192.0.2.1")


def test_the_process_that_listens_on_a_port_is_named():
    with ports.hold() as held:
        assert ports.listeners(held.port) == frozenset()  # held, but nobody listens
        with socket.create_server(("127.0.0.1", held.port)):
            found = ports.listeners(held.port)
            assert found
            assert ports.holds([os.getpid()], found)
            assert not ports.holds([os.getppid(), 0x7FFFFFFF], found)


def test_members_of_a_session_are_its_living_processes():
    lead = "import os, subprocess, sys; subprocess.Popen(['sleep', '600']); print('up', flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", lead], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout.readline() == b"up\n"
    found = ports.members(leader.pid)
    assert leader.pid in found
    assert len(found) == 2
    assert os.getpid() not in found
    for pid in found:
        os.kill(pid, 9)
    leader.wait()
    leader.stdin.close()
    leader.stdout.read()  # closed by the last of them
    leader.stdout.close()
    while ports.members(leader.pid):
        pass


def test_no_session_has_no_members():
    """Session 0 is the kernel's and init's: whoever kills members must never see them."""
    assert ports.members(0) == []
