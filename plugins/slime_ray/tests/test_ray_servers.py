"""Servers on the nodes of a Ray cluster: the real launcher around a stand-in for SGLang, on two nodes of this machine
whose addresses differ as those of machines do."""

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import engine_case
import pytest
from ray_nodes import ray_cluster
from server_case import QUICK, WatchedEngine, seen

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_core.clusters.hangs import Servers
from slime_core.clusters.host import NCCL_MEMORY
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import load_config
from slime_core.errors import ConfigError, EngineError
from slime_ray import device, servers as ray_servers
from slime_ray.joining import entered, hosts
from slime_ray.placement import plan
from slime_ray.servers import RayPlacements
from slime_sglang import held_ports as ports
from slime_sglang.gateway import Process
from slime_sglang.health import Watch
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STAND_IN = Path(__file__).parents[2] / "slime_sglang" / "tests" / "stand_in"
LONG = 120.0
OPEN = {"RAY_AUTH_MODE": "disabled"}
FAR = "127.0.0.2"


@pytest.fixture(scope="module")
def nodes():
    """A head with two processors, and a node with two more and two GPUs that are but numbers.

    Ray's token has its tests elsewhere; a process that joins by several fixtures cannot change what it goes by.
    """
    words = (f"--node-ip-address={FAR}", "--num-gpus=2")
    with ray_cluster(**OPEN) as found, found.node("far", f"--address={found.address}", *words, processors=2):
        yield found


def config_of(nodes, *flags, device="cpu"):
    words = ["--rollout-engine", "sglang", "--cluster", "ray", "--ray-address", nodes.address, "--hf-checkpoint", "."]
    threads = () if "--cpu-threads" in flags else ("--cpu-threads", "2")
    return load_config(None, [*words, "--device", device, *threads, *map(str, flags)])


APART = ("--no-colocate", "--rollout-num-engines", 1)
"""A bundle of two processors for the rank, another for the server: each fills a node."""


@asynccontextmanager
async def placements(nodes, *flags, device="cpu"):
    config = config_of(nodes, *flags, device=device)
    placed = plan(config)
    with entered(nodes.address):
        async with hosts(config, placed) as found:
            yield RayPlacements(config, placed, found), placed, found


def served(tmp_path, place, *behave, python=sys.executable):
    launch = server_launch(
        python=python,
        arguments=("--behave", ",".join(behave)),
        log=tmp_path / "log" / "engine-0.log",
        env={"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1", **place.env},
        address=place.address,
    )
    return Server.launch(launch, host=place.host)


async def until(true):
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.01)


def test_a_server_lives_in_its_seat_alone_comes_back_when_it_is_killed_and_ends_with_its_host(nodes, tmp_path):
    """Three chapters of one server's seat, since its host takes seconds to come."""

    async def check():
        async with placements(nodes, *APART, "sglang.python=/no/such/python") as (where, placed, found):
            await refused(where, found.machines[placed.engines[0].bundle], tmp_path)
            token = await alive(nodes, where, placed, found, tmp_path)
            await lost(where, found.machines[placed.engines[0].bundle], tmp_path)
        said = [path for path in Path(nodes.where).rglob("*.log") if token in seen(path)]
        assert said == [], "the token is in Ray's logs"

    asyncio.run(check())


async def refused(where, machine, tmp_path):
    """A program that is not there is an error that names the machine."""
    server = served(tmp_path, where.server(0), python="/no/such/python")
    with pytest.raises(EngineError) as caught:
        await server.start()
    assert (caught.value.code, caught.value.where) == ("ENG69", f"{machine.name}:{server.log}")
    assert "No such file" in caught.value.what
    with pytest.raises(ConfigError) as caught:
        await where.on_server("slime_sglang.installation:read_here", {"python": "/no/such/python"})
    assert (caught.value.code, caught.value.where) == ("CFG05", f"{machine.name}: sglang.python")
    # the machine's, which is here the driver's too
    assert await where.on_trainer("importlib.metadata:version", "torch") == version("torch")


async def alive(nodes, where, placed, found, tmp_path):
    """It listens there alone, and comes back when it is killed; its token."""
    place, machine = where.server(0), found.machines[placed.engines[0].bundle]
    assert {one.address for one in found.machines} == {
        machine.address,
        where.trainer_address(["http://10.0.0.1:1"]),
    }
    server = served(tmp_path, place, "children")
    await server.start()
    await server.ready(LONG)
    url, token, session = server.address.url, server.address.token, server.pid
    assert url.startswith(f"http://{machine.address}:")
    assert where.trainer_address([url]) == found.machines[placed.ranks[0].bundle].address
    assert listening(int(url.rpartition(":")[2])) == [machine.address]
    await until(lambda: "is up" in seen(server.log))
    for pid in [*ports.members(session), *nodes.pids()]:
        assert token not in seen(f"/proc/{pid}/cmdline") + seen(f"/proc/{pid}/environ")
    assert server.where == f"{machine.name}:{server.log}"
    (member,) = Servers([server]).members()
    look = await member.channel.look()
    assert (member.name, look.pid, look.state != "") == ("SGLang server 0", session, True)
    scheduler = int(seen(server.log).split("scheduler ")[1].split()[0])
    os.kill(scheduler, signal.SIGKILL)
    how = await asyncio.wait_for(server.died(), LONG)
    assert how == f"was killed by SIGKILL after its process scheduler_0 ({scheduler}) was killed by SIGKILL"
    assert ports.members(session) == []
    await server.start()
    await server.ready(LONG)
    assert (server.address.generation, server.address.url != url, server.lost) == (2, True, "")
    session = server.pid
    await server.stop()
    assert (server.pid, ports.members(session)) == (0, [])
    return token


def listening(port):
    """Addresses on which somebody listens at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == ports.LISTENING]
    return [".".join(str(b) for b in bytes.fromhex(address)[::-1]) for address, at in local if int(at, 16) == port]


async def lost(where, machine, tmp_path):
    """A host that is lost takes its server with it and ends the run, to go on elsewhere.

    However many restarts a server has left: its machine may be gone, and is not asked for again.
    """
    server = served(tmp_path, where.server(0), "children")
    await server.start()
    await server.ready(LONG)
    session, engine = server.pid, WatchedEngine()
    engine.servers = {0: server}
    async with Watch([server], engine, QUICK) as watch:
        os.kill(machine.pid, signal.SIGKILL)
        await until(lambda: engine.end is not None)
    assert (engine.end.code, engine.end.lost) == ("ENG84", True)
    assert f"SGLang server 0 was lost with its host on {machine.name}" in engine.end.what
    assert (watch.states, watch.restarts) == ({0: "retired"}, {0: 0})
    await until(lambda: not ports.members(session))  # its launcher hangs on the host's pipe
    with pytest.raises(EngineError) as caught:
        await server.start()
    assert (caught.value.code, caught.value.lost) == ("ENG84", True)
    await server.stop()


@pytest.mark.nightly
def test_a_host_that_stands_still_is_not_waited_for_for_ever(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_servers, "STARTING", 1.0)
    monkeypatch.setattr(ray_servers, "ENDING", 1.0)

    async def check():
        async with placements(nodes, *APART) as (where, placed, found):
            machine = found.machines[placed.engines[0].bundle]
            server = served(tmp_path, where.server(0))
            await server.start()
            await server.ready(LONG)
            session = server.pid
            os.kill(machine.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(EngineError, match="does not answer") as caught:
                await server.start()
            assert (caught.value.code, caught.value.lost) == ("ENG69", False)
            assert time.monotonic() - began < LONG
        await until(lambda: not ports.members(session))  # the host was killed, stopped as it was

    asyncio.run(check())


def test_sglangs_router_lives_beside_the_first_server_and_a_groups_servers_where_they_are_placed(nodes, tmp_path):
    (tmp_path / "groups.toml").write_text('[[group]]\ncount = 2\n[[group]]\nrole = "reward"\nmodel = "."\n')

    async def check():
        flags = ("--debug-rollout-only", "--engine-topology", tmp_path / "groups.toml")
        async with placements(nodes, *flags, "--cpu-threads", "1") as (where, placed, found):
            assert len(found.machines) == len(placed.engines) == 3
            machines = [where.server(number).host.machine for number in range(3)]
            assert machines == found.machines
            at = where.beside("policy")
            assert (at.host.machine, at.address) == (found.machines[0], found.reached(found.machines[0]))
            words = engine_case.launch(tmp_path)
            router = Process.launch(replace(words, address=at.address), number=-1, host=at.host)
            await router.start()
            await router.ready(LONG)
            assert router.address.url.startswith(f"http://{at.address}:")
            pid = router.pid
            await router.stop()
            assert ports.members(pid) == []
            assert where.trainer_address([router.address.url]) == "127.0.0.1", "no rank listens"

    asyncio.run(check())


@pytest.mark.parametrize(
    "flags", [("--colocate",), pytest.param(("--no-colocate", "--rollout-num-gpus", 1), marks=pytest.mark.nightly)]
)
def test_a_server_sees_the_gpus_of_its_seat_alone(nodes, tmp_path, flags, monkeypatch):
    """And what NCCL is told of its memory, as the ranks are."""
    monkeypatch.setenv(NCCL_MEMORY, "0")

    async def check():
        async with placements(nodes, *flags, device="cuda") as (where, placed, found):
            server = served(tmp_path, where.server(0), "children")
            await server.start()
            await server.ready(LONG)
            words = seen(f"/proc/{ports.members(server.pid)[-1]}/environ").split("\0")
            (name,) = found.machines[placed.engines[0].bundle].gpus
            assert {f"CUDA_VISIBLE_DEVICES={name}", f"{NCCL_MEMORY}=0"} <= set(words)
            assert (server.address.url.rpartition(":")[0], found.alone) == (f"http://{FAR}", False)
            await server.stop()

    asyncio.run(check())


@pytest.mark.nightly
def test_the_device_of_a_cluster_is_that_of_its_machines(nodes):
    """This machine has no GPU; the cluster says that one of its nodes has."""
    assert resolve_machine(config_of(nodes, device="auto")).cluster.device == "cuda"
    with ray_cluster(**OPEN) as bare:
        assert device.device_of(config_of(bare, device="auto")) == "cpu"
    own = load_config(None, ["--hf-checkpoint", ".", "--cluster", "ray", "--ray-address", "local"])
    assert device.device_of(own) == "", "a cluster of its own is this machine"


@pytest.mark.nightly
def test_a_machine_that_is_lost_is_told_as_its_hosts_are(nodes, tmp_path):
    """The last test: its node does not come back."""

    async def check():
        async with placements(nodes, "--no-colocate", "--rollout-num-gpus", 1, device="cuda") as (where, _, found):
            server = served(tmp_path, where.server(0), "children")
            await server.start()
            await server.ready(LONG)
            session = server.pid
            lost = [*nodes.pids("far"), *ports.members(session)]
            for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: none of them sees another's end
                for pid in lost:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            how = await asyncio.wait_for(server.died(), LONG)
            assert how.startswith(f"was lost with its host on {found.machines[0].name}"), how
            assert server.lost == how
            assert await where.server(0).host.listener(1) == "nobody"

    asyncio.run(check())
