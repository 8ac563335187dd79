"""The calls with which a server takes an update, in their order, and what is said where one of them fails."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from aiohttp import web
from travelling import sent, tensors_of

from slime_core.errors import EngineError
from slime_core.types import WeightRoute, WeightUpdate
from slime_core.weights.transports import disk
from slime_sglang.address import ServerAddress
from slime_sglang.client import Client, ServerFault
from slime_sglang.loading import load
from slime_sglang.senders import nccl, tensor

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
BEGIN, END = "/begin_weight_update", "/end_weight_update"


class Updating:
    """A server that takes updates, or fails as told: ``fails`` is a path -> status and message, each once."""

    def __init__(self, *, stamps=True, open_already=False, **fails):
        self.calls, self.fails, self.stamps, self.open = [], fails, stamps, open_already
        self.stuck = asyncio.Event()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/{path}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.stuck.set()
        await self._runner.cleanup()

    async def _answer(self, request):
        body = await request.json()
        self.calls.append((request.path, body))
        status, message = self.fails.pop(request.path[1:], (200, "Success"))
        if message == "dies":
            request.transport.close()
        if message == "hangs":
            await self.stuck.wait()
        if request.path == BEGIN and self.open:
            status, message = 400, "a weight-update session is already open"
        if status == 200 and request.path in (BEGIN, END):
            self.open = request.path == BEGIN
        if status == 200 and body.get("weight_version") and self.stamps:
            message += f" Weight version updated to {body['weight_version']}."
        return web.json_response({"success": status == 200, "message": message}, status=status)

    @property
    def paths(self):
        return [path for path, _ in self.calls]


@asynccontextmanager
async def client_of(server, *features):
    client = Client(
        ServerAddress(url=server.url, number=2), vocab_size=9, context_len=9, features=frozenset(features), concurrency=4,
        timeout=30, retries=0, epoch=3,
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()


async def loaded(server, update, *features, timeout=30.0, flush=True, **more):
    async with client_of(server, *features) as client:
        await load(client, update, timeout=timeout, flush=flush, **more)


def update_of(sender, route):
    handle, _ = sent(sender, tensors_of(), route)
    return WeightUpdate(version=4, epoch=3, transport=route.transport, handle=handle)


def disk_update(tmp_path):
    return update_of(disk.DiskSender(CPU, {}), WeightRoute(transport="disk", dtype="float32", folder=str(tmp_path)))


def tensor_update():
    return update_of(tensor.TensorSender(CPU), WeightRoute(transport="tensor", dtype="float32"))


def broadcast(sender, **more):
    route = {"transport": "nccl", "dtype": "float32", "address": "127.0.0.1:0", "world": 2, "group": "g",
             "buffer_bytes": 1100, "timeout": 30.0}  # fmt: skip
    return update_of(sender, WeightRoute(**{**route, **more}))


def test_a_folder_is_one_call_that_names_the_version_and_leaves_requests_alone(tmp_path):
    async def one():
        async with Updating() as server:
            await loaded(server, disk_update(tmp_path), flush=False)
            ((path, body),) = server.calls
        assert path == "/update_weights_from_disk"
        assert body == {
            "model_path": str(tmp_path / "v-4"), "load_format": "auto", "flush_cache": False,
            "abort_all_requests": False, "torch_empty_cache": False, "weight_version": "3.4",
        }  # fmt: skip

    asyncio.run(one())


@pytest.mark.parametrize("damage", ["cut", "vanished", "empty"])
def test_a_damaged_folder_never_reaches_the_server(tmp_path, damage):
    """A truncated shard; and a folder that vanishes."""

    async def damaged():
        update = disk_update(tmp_path)
        file = tmp_path / "v-4" / "model.safetensors"
        if damage == "cut":
            with file.open("r+b") as shard:
                shard.truncate(file.stat().st_size - 1)
        else:
            file.unlink()
            if damage == "vanished":
                file.parent.rmdir()
        async with Updating() as server:
            with pytest.raises(EngineError) as error:
                await loaded(server, update)
            assert server.calls == []
        assert (error.value.code, error.value.where) == ("ENG86", server.url)
        assert str(tmp_path / "v-4") in error.value.why

    asyncio.run(damaged())


def test_an_update_that_a_server_refuses_ends_with_its_message(tmp_path):
    async def refused():
        async with Updating(update_weights_from_disk=(400, "Failed to get weights iterator: no.")) as server:
            with pytest.raises(EngineError, match="server 2 did not take version 4 by disk") as error:
                await loaded(server, disk_update(tmp_path))
        assert error.value.code == "ENG86"
        assert "Failed to get weights iterator: no." in error.value.why

    asyncio.run(refused())


def test_a_server_that_stamps_no_version_is_an_error(tmp_path):
    async def unstamped():
        async with Updating(stamps=False) as server:
            with pytest.raises(EngineError, match="does not say that it serves it") as error:
                await loaded(server, disk_update(tmp_path))
        assert error.value.code == "ENG83"

    asyncio.run(unstamped())


def test_each_rank_of_a_server_gets_the_handle_of_the_copy_on_its_gpu():
    async def spread():
        update = tensor_update()
        (bucket,) = update.handle["buckets"]
        update.handle["copies"] = {"1": [{**bucket, "handle": "on 1"}], "2": [{**bucket, "handle": "on 2"}]}
        async with Updating() as server:
            await loaded(server, update, ranks=2, trainers=(0, 1))
            await loaded(server, update, ranks=1, trainers=(2,))
        assert [call["serialized_named_tensors"] for _, call in server.calls] == [
            [bucket["handle"], "on 1"], ["on 2"]
        ]  # fmt: skip

    asyncio.run(spread())


def test_handles_go_once_a_rank_inside_the_brackets_of_a_newer_server():
    async def both():
        update = tensor_update()
        (bucket,) = update.handle["buckets"]
        async with Updating() as older:
            await loaded(older, update, ranks=2)
        async with Updating() as newer:
            await loaded(newer, update, "update_brackets")
        assert older.paths == ["/update_weights_from_tensor"]
        assert newer.paths == [BEGIN, "/update_weights_from_tensor", END]
        assert older.calls[0][1] == {
            "serialized_named_tensors": [bucket["handle"]] * 2, "load_format": "flattened_bucket", "flush_cache": True,
            "abort_all_requests": False, "torch_empty_cache": False, "weight_version": "3.4",
        }  # fmt: skip

    asyncio.run(both())


def test_brackets_are_closed_after_a_failure_and_opened_again_where_an_update_broke_off():
    """The update after a failed one must not find the server in the middle of it."""

    async def broken():
        update = tensor_update()
        async with Updating(update_weights_from_tensor=(400, "size mismatch")) as server:
            with pytest.raises(EngineError, match="size mismatch"):
                await loaded(server, update, "update_brackets")
            assert server.paths[-1] == END
            assert not server.open
        async with Updating(open_already=True) as server:
            await loaded(server, update, "update_brackets")
            assert server.paths == [BEGIN, END, BEGIN, "/update_weights_from_tensor", END]

    asyncio.run(broken())


def test_a_refused_bracket_is_told_and_no_weights_are_sent():
    async def refused():
        fails = {"begin_weight_update": (400, "no"), "end_weight_update": (400, "nothing is open")}
        async with Updating(**fails) as server:
            with pytest.raises(EngineError, match="nothing is open"):
                await loaded(server, tensor_update(), "update_brackets")
            assert server.paths == [BEGIN, END]

    asyncio.run(refused())


def test_a_server_that_dies_is_a_fault_of_the_server():
    """Whoever called fences it."""

    async def dies():
        async with Updating(update_weights_from_tensor=(200, "dies")) as server:
            with pytest.raises(ServerFault):
                await loaded(server, tensor_update())

    asyncio.run(dies())


def test_a_group_that_the_server_cannot_join_ends_the_broadcast_too():
    """Neither side waits for its deadline."""

    async def refused():
        sender = nccl.BroadcastSender(CPU)
        update = broadcast(sender)
        async with Updating(init_weights_update_group=(400, "Failed to initialize: no.")) as server:
            with pytest.raises(EngineError, match=r"Failed to initialize: no\.") as error:
                await loaded(server, update, "update_brackets", first_rank=5)
            ((path, body),) = server.calls
        assert error.value.code == "ENG86"
        host, _, port = update.handle["address"].rpartition(":")
        assert (path, body) == ("/init_weights_update_group", {
            "master_address": host, "master_port": int(port), "rank_offset": 5, "world_size": 2, "group_name": "g",
            "backend": "gloo",
        })  # fmt: skip
        assert await asyncio.to_thread(sender._transfer.done.wait, 20)
        assert "server 2: " in sender._transfer.error
        assert "Failed to initialize: no." in sender._transfer.error

    asyncio.run(refused())


def test_an_error_of_the_trainer_ends_a_load_that_waits_for_the_server():
    """The server hangs in a broadcast that never comes; the load has the trainer's words."""

    async def waits():
        sender = nccl.BroadcastSender(CPU)
        update = broadcast(sender, timeout=0.5)  # the trainer gives up first
        async with Updating(init_weights_update_group=(200, "hangs")) as server:
            with pytest.raises(EngineError, match="did not take the weights in time") as error:
                await loaded(server, update)
        assert error.value.code == "ENG86"
        assert "trainer rank 0" in error.value.why

    asyncio.run(waits())


def test_a_server_that_hangs_ends_the_load_at_its_deadline_and_the_trainer_with_it():
    async def hangs():
        sender = nccl.BroadcastSender(CPU)
        update = broadcast(sender)
        async with Updating(init_weights_update_group=(200, "hangs")) as server:
            with pytest.raises(EngineError):
                await loaded(server, update, timeout=0.5)
        assert await asyncio.to_thread(sender._transfer.done.wait, 20)
        assert sender._transfer.error.startswith("server 2: ")

    asyncio.run(hangs())


def test_a_store_that_nobody_keeps_is_told():
    async def gone():
        handle = {"buckets": [], "group": "g", "address": "127.0.0.1:9", "world": 2, "backend": "gloo", "number": 1,
                  "join": True}  # fmt: skip
        async with Updating() as server:
            with pytest.raises(EngineError, match=r"the trainer's store at 127\.0\.0\.1:9 does not answer"):
                await loaded(server, WeightUpdate(version=4, epoch=3, transport="nccl", handle=handle), timeout=0.5)

    asyncio.run(gone())


def test_an_unknown_transport_is_refused():
    async def unknown():
        async with Updating() as server:
            with pytest.raises(EngineError, match="has no transport shared"):
                await loaded(server, WeightUpdate(version=4, epoch=3, transport="shared"))

    asyncio.run(unknown())
