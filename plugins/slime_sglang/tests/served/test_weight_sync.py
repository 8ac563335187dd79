"""Weights from a real trainer into a real server, by every transport: bit for bit, or an error that says what is wrong."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_server import RawServer

from slime_core.config.schema import Config
from slime_core.errors import EngineError
from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import WeightRoute, WeightUpdate
from slime_core.weights.folder import ModelFolder
from slime_sglang.client import Client
from slime_sglang.layout import layout
from slime_sglang.loading import load
from slime_sglang.probe import features
from slime_sglang.senders import nccl

pytestmark = pytest.mark.system

TRANSPORTS = ["disk", "tensor", "nccl"]
PROMPT = (13, 14, 15)
TIMEOUT = 120.0
EPOCH = 3


class Source:
    """A trainer over the served model's folder, whose weights a test changes."""

    def __init__(self, folder: Path) -> None:
        config = Config.model_validate(
            {"rollout": {"hf_checkpoint": str(folder), "rollout_engine": "sglang"}, "train": {"dtype": "float32"}}
        )
        self.thread, self.folder = TorchThread(1), ModelFolder.open(folder)
        self.trainer = FsdpTrainer(config, load_plugins(config), self.folder, thread=self.thread, epoch=EPOCH)

    def change(self, seed: int) -> None:
        """Other weights, of a seed."""
        torch.manual_seed(seed)
        for tensor in self.trainer._worker.actor.locals().values():
            tensor.add_(torch.randn_like(tensor) * 0.05)

    async def publish(
        self, version: int, server: RawServer, transport: str, folder: Path, **more: Any
    ) -> WeightUpdate:
        """An update with the checksums of every tensor that the server names."""
        async with client_of(server) as client:
            names = list((await client.checksums())[0])
        route = WeightRoute(
            transport=transport,  # type: ignore[arg-type]
            dtype="float32",
            folder=str(folder),
            buffer_bytes=100_000,
            address="127.0.0.1:0",
            world=2,
            group=more.pop("group", f"group-{folder.name}"),
            timeout=TIMEOUT,
            checks=layout(names, self.folder.config, 1),
            **more,
        )
        return await self.trainer.publish(version, route)

    async def publish_damaged(self, version: int, sources: Any, transport: Any, folder: Path) -> WeightUpdate:
        """What ``sources`` makes of the trainer's tensors, with no checksums."""
        publisher: Any = self.trainer._worker
        whole = publisher.sources()
        publisher.sources = lambda: sources(whole)
        route = WeightRoute(
            transport=transport, dtype="float32", address="127.0.0.1:0", world=2, group=f"damaged-{folder.name}",
            timeout=TIMEOUT,
        )  # fmt: skip
        try:
            return await self.trainer.publish(version, route)
        finally:
            del publisher.sources


@pytest.fixture(scope="module")
def source(served_model: Path) -> Iterator[Source]:
    made = Source(served_model)
    yield made
    made.thread.close()


@pytest.fixture(scope="session")
def abilities(sglang_python: str) -> frozenset[str]:
    """Of the installation, read from its source."""
    (folder,) = Path(sglang_python).absolute().parent.parent.glob("lib/python3*/site-packages/sglang")
    return frozenset(features(folder))


KNOWN: dict[str, frozenset[str]] = {}


@pytest.fixture(autouse=True)
def _known(abilities: frozenset[str]) -> None:
    KNOWN["features"] = abilities


@asynccontextmanager
async def client_of(server: RawServer) -> AsyncIterator[Client]:
    """A client for one event loop."""
    client = Client(
        server.server.address,
        vocab_size=99,
        context_len=1024,
        features=KNOWN["features"],
        concurrency=8,
        timeout=TIMEOUT,
        retries=0,
        epoch=EPOCH,
    )
    try:
        yield client
    finally:
        await client.close()


async def loaded(server: RawServer, update: WeightUpdate, **more: Any) -> dict[str, str]:
    """Load, and the server's checksums afterwards."""
    async with client_of(server) as client:
        await load(client, update, timeout=TIMEOUT, flush=True, **more)
        return (await client.checksums())[0]


async def sums(server: RawServer) -> dict[str, str]:
    async with client_of(server) as client:
        return (await client.checksums())[0]


def version(server: RawServer) -> str:
    return str(server.generate(PROMPT, 2)["meta_info"]["weight_version"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_tensor_of_the_server_is_the_trainers_after_each_update(
    source: Source, server: RawServer, tmp_path: Path, transport: str
) -> None:
    async def twice() -> None:
        before = await sums(server)
        for number in (4, 5):
            source.change(number)
            update = await source.publish(number, server, transport, tmp_path)
            found = await loaded(server, update)
            assert found == update.fingerprints  # every name, tied ones and joined ones too
            assert found != before
            before = found
            assert version(server) == f"{EPOCH}.{number}"

    asyncio.run(twice())


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_a_partial_bucket_is_found_by_the_checksums(
    source: Source, server: RawServer, tmp_path: Path, transport: str
) -> None:
    """A tensor that is left out keeps its old bytes, and the server says nothing: the canary has to see it."""

    async def partial() -> None:
        source.change(11)
        left_out = "model.layers.0.mlp.down_proj.weight"
        update = await source.publish_damaged(
            11, lambda whole: [one for one in whole if one.parts[0].name != left_out], transport, tmp_path
        )
        found = await loaded(server, update)
        right = (await source.publish(12, server, "disk", tmp_path)).fingerprints
        assert [name for name in right if found[name] != right[name]] == [left_out]

    asyncio.run(partial())


@pytest.mark.parametrize("damage", ["cut", "vanished", "other_model"])
def test_a_damaged_folder_is_refused_and_the_server_serves_on(
    source: Source, server: RawServer, tmp_path: Path, damage: str
) -> None:
    """Left to itself the server would roll back to the same folder, and die."""

    async def damaged() -> None:
        update = await source.publish(6, server, "disk", tmp_path)
        good = await loaded(server, update)
        source.change(7)
        broken = await source.publish(7, server, "disk", tmp_path)
        folder = Path(broken.handle["folder"])
        file = folder / "model.safetensors"
        if damage == "cut":
            with file.open("r+b") as shard:
                shard.truncate(file.stat().st_size - 100)
        elif damage == "vanished":
            shutil.rmtree(folder)
        else:
            file.unlink()
        with pytest.raises(EngineError) as error:
            await loaded(server, broken)
        assert error.value.code == "ENG86"
        assert str(folder) in error.value.why
        assert error.value.where == server.server.address.url
        assert await sums(server) == good
        assert version(server) == f"{EPOCH}.6"

    asyncio.run(damaged())


def test_an_update_that_the_server_refuses_ends_with_its_message_and_the_next_works(
    source: Source, server: RawServer, tmp_path: Path
) -> None:
    """A tensor of a shape that the model has not. (By tensor 0.5.23 does not refuse it, but ends.)"""
    transport = "nccl"

    async def refused() -> None:
        def reshaped(whole: list[Any]) -> list[Any]:
            first, *others = whole
            (part,) = first.parts
            turned = type(part)(part.name, (part.shape[1], part.shape[0]), lambda tensor: tensor.T.contiguous())
            return [type(first)((turned,), first.gather), *others]

        update = await source.publish_damaged(8, reshaped, transport, tmp_path)
        with pytest.raises(EngineError) as error:
            await loaded(server, update)
        assert error.value.code == "ENG86"
        assert error.value.why
        assert transport in error.value.what
        again = await source.publish(9, server, transport, tmp_path, group=f"again-{tmp_path.name}")
        assert await loaded(server, again) == again.fingerprints

    asyncio.run(refused())


def test_a_server_that_gives_up_ends_the_trainers_broadcast(source: Source, server: RawServer, tmp_path: Path) -> None:
    """The group's name is known to the server already, so it cannot join; nobody waits for the deadline."""

    async def given_up() -> None:
        update = await source.publish(10, server, "nccl", tmp_path)
        await loaded(server, update)
        sender: Any = source.trainer._worker.senders.by_transport["nccl"]
        sender._group = None  # a trainer that was restarted and names its group as before
        update = await source.publish(11, server, "nccl", tmp_path)
        assert update.handle["join"]
        with pytest.raises(EngineError, match="ENG86 server 0 did not take version 11 by nccl"):
            await loaded(server, update)
        assert sender._transfer.done.wait(TIMEOUT / 2)
        assert sender._transfer.error.startswith("server 0: ")
        store = nccl.open_store(update.handle["address"], timeout=5)
        assert nccl.failure_reason(store, nccl.failure_key(update.handle["group"], update.handle["number"]))

    asyncio.run(given_up())
