"""A server that asks for weights between two updates gets the version that is served, and waits while one is made."""

import asyncio

import pytest

from durability.fake_trainer import FakeTrainer
from slime_core.clusters.colocation import DedicatedDevices, Resync
from slime_core.testing.fakes import FakeEngine
from slime_core.types import WeightRoute

pytestmark = pytest.mark.unit

ROUTE = WeightRoute(transport="disk", dtype="float32")


async def republish(version=4):
    trainer, engine = FakeTrainer(), FakeEngine()
    await engine.load(await trainer.publish(version))
    return Resync(DedicatedDevices(), trainer, engine), trainer, engine


def test_between_two_updates_the_version_that_is_served_is_published():
    async def main():
        devices, _, _ = await republish()
        assert (await devices.source(ROUTE)).version == 4

    asyncio.run(main())


def test_from_training_to_the_end_of_the_update_it_waits_and_then_gets_the_new_version():
    async def main():
        devices, trainer, engine = await republish()
        async with devices.training():
            asked = asyncio.create_task(devices.source(ROUTE))
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asked.done()  # trained, and not yet served
        async with devices.syncing():
            await engine.load(await trainer.publish(5))
        assert (await asked).version == 5

    asyncio.run(main())


def test_a_first_update_waits_for_a_server_that_asks_and_frees_only_its_own_hold():
    async def main():
        devices, _, _ = await republish()
        asked = asyncio.create_task(devices.source(ROUTE))
        await asyncio.sleep(0)
        async with devices.syncing():
            assert asked.done()
        async with devices.syncing():
            pass
        assert (await devices.source(ROUTE)).version == 4

    asyncio.run(main())
