"""Servers that are stopped together: as processes, with the real launcher around a stand-in."""

import asyncio

import pytest

from slime_core.errors import EngineError
from slime_sglang import held_ports as ports
from slime_sglang.start import _start, _stop

pytestmark = pytest.mark.integration

LONG = 120.0


def test_servers_that_were_stopped_together_leave_no_process(stand_in, shared_memory):
    async def work():
        servers = [stand_in("children", number=number) for number in range(3)]
        await _start(servers, LONG)
        leaders = [server.pid for server in servers]
        assert all(ports.members(pid) for pid in leaders)
        await _stop(servers)
        assert [ports.members(pid) for pid in leaders] == [[], [], []]
        assert not shared_memory()

    asyncio.run(asyncio.wait_for(work(), 2 * LONG))


def test_servers_are_stopped_while_they_start_where_one_never_came_up(stand_in):
    """Its siblings are stopped while they still start."""

    async def work():
        servers = [stand_in("children", number=0), stand_in("ends", number=1), stand_in("mute", number=2)]
        try:
            with pytest.raises(EngineError, match="ENG69"):
                await _start(servers, LONG)
            leaders = [server.pid for server in servers]
        finally:
            await _stop(servers)
        assert [ports.members(pid) for pid in leaders if pid] == [[] for pid in leaders if pid]

    asyncio.run(asyncio.wait_for(work(), 2 * LONG))
