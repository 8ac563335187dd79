"""Engine and trainer on one device: the order in which memory changes hands, and what that costs is told."""

import asyncio

import pytest
import trainer_bench as made
from one_device import Device, StrictEngine, StrictTrainer, lent

from slime_core.clusters.colocation import DedicatedDevices, MemorySwapping, TimeSharing
from slime_core.config.load import load_config
from slime_core.errors import EngineError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.fakes import FakeEngine
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import GenerateRequest, SamplingParams
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

TURN = """pause retract
engine - kv weights
trainer + gradients optimizer parameters
trainer - gradients optimizer
engine + weights
publish {version}
load {version}
trainer - parameters
engine + kv
resume"""


async def turn(engine, trainer, devices, version):
    async with devices.training():
        assert engine.device.free() >= 0
        await trainer.step(Nothing())
    async with devices.syncing():
        await engine.load(await trainer.publish(version))


class Nothing:
    """A batch without samples."""

    def __init__(self):
        self.columns, self.loss_mask, self.sample_ids = {}, (), ()

    def __len__(self):
        return 0


def test_memory_changes_hands_in_the_order_of_the_design():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        device.log.clear()
        for version in (1, 2):
            await turn(engine, trainer, devices, version)
        return "\n".join(device.log)

    assert asyncio.run(run()) == "\n".join(TURN.format(version=version) for version in (1, 2))


ONE_SIDE = {
    "trainer": """pause keep
trainer + gradients optimizer parameters
trainer - gradients optimizer
publish {version}
load {version}
trainer - parameters
resume""",
    "engine": """pause retract
engine - kv weights
engine + weights
publish {version}
load {version}
engine + kv
resume""",
}


@pytest.mark.parametrize("gives", ONE_SIDE)
def test_one_side_alone_may_give_its_memory(gives):
    """The other keeps all of its own, from the start on; a stage that begins without training is the same."""

    async def run():
        device = Device(200)
        engine = StrictEngine(device)
        if gives == "engine":
            await engine.pause("retract")
            await engine.release({"kv", "weights"})
        trainer = StrictTrainer(device)
        sides = {"swap_engine": gives == "engine", "swap_trainer": gives == "trainer"}
        devices = MemorySwapping(engine, trainer, released=gives == "engine", free=device.free, **sides)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        device.log.clear()
        for version in (1, 2):
            await turn(engine, trainer, devices, version)
        found, device.log = device.log, []
        async with devices.syncing():
            await engine.load(await trainer.publish(2))
        return found, device.log, device.held

    found, later, held = asyncio.run(run())
    assert "\n".join(found) == "\n".join(ONE_SIDE[gives].format(version=version) for version in (1, 2))
    wanted = [line for line in ONE_SIDE[gives].format(version=2).splitlines() if "optimizer" not in line]
    if gives == "trainer":
        wanted.insert(1, "trainer + parameters")
    else:
        wanted = ["pause retract", "engine - kv", "publish 2", "load 2", "engine + kv", "resume"]
    assert later == wanted
    assert held.keys() >= {("engine", "kv"), ("engine", "weights")}


def test_the_engine_makes_room_before_the_trainer_is_made():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        assert engine.version == 0
        return device

    device = asyncio.run(run())
    assert "\n".join(device.log) == (
        "engine + kv weights\npause retract\nengine - kv weights\ntrainer + gradients optimizer parameters\n"
        "trainer - gradients optimizer\nengine + weights\npublish 0\nload 0\ntrainer - parameters\nengine + kv\nresume"
    )
    assert device.held == {("engine", "kv"): 40, ("engine", "weights"): 10}


def test_a_later_stage_begins_with_the_weights_that_the_trainer_had_given_up():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        await turn(engine, trainer, devices, 1)
        device.log.clear()
        async with devices.syncing():  # no training before it
            await engine.load(await trainer.publish(1))
        log, device.log = device.log, []
        await turn(engine, trainer, devices, 2)
        return log, device.log

    log, after = asyncio.run(run())
    assert "\n".join(log) == (
        "pause retract\nengine - kv\ntrainer + parameters\npublish 1\nload 1\ntrainer - parameters\nengine + kv\nresume"
    )
    assert "\n".join(after) == TURN.format(version=2)


def test_requests_in_flight_are_held_over_the_turn_and_go_on_with_the_new_weights():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        params = SamplingParams(max_new_tokens=30, ignore_eos=True)
        engine.stop_token = -1
        running = asyncio.create_task(engine.generate(GenerateRequest(id="a", tokens=[1], params=params, seed=3)))
        for _ in range(5):
            await asyncio.sleep(0)
        await turn(engine, trainer, devices, 1)
        return await asyncio.wait_for(running, 10)

    out = asyncio.run(run())
    assert len(out.tokens) == 30
    assert set(out.versions) == {0, 1}
    assert out.versions == sorted(out.versions)


def test_each_turn_tells_its_seconds_and_the_bytes_that_moved():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        await turn(engine, trainer, devices, 1)
        first = dict(devices.metrics)
        await turn(engine, trainer, devices, 2)
        return first, devices.metrics

    first, second = asyncio.run(run())
    assert first.keys() == second.keys()
    moved = {name.removesuffix("_bytes"): value for name, value in second.items() if name.endswith("_bytes")}
    assert moved == {
        "swap/pause": 0,
        "swap/engine_release": 50,
        "swap/trainer_reacquire": 80,
        "swap/trainer_drop": 60,
        "swap/engine_weights": 10,
        "swap/trainer_release": 20,
        "swap/engine_kv": 40,
        "swap/resume": 0,
        "swap/total": 260,
    }
    seconds = {name: value for name, value in second.items() if name.endswith("_seconds")}
    assert seconds.keys() == {*(f"{name}_seconds" for name in moved), "swap/load_seconds"}
    total = seconds.pop("swap/total_seconds")
    assert total == pytest.approx(sum(seconds.values()) - seconds["swap/load_seconds"])


def test_without_a_meter_only_seconds_are_told():
    async def run():
        device = Device()
        engine, trainer, _ = await lent(device)
        devices = MemorySwapping(engine, trainer, released=True)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        return devices.metrics

    assert all(name.endswith("_seconds") for name in asyncio.run(run()))


def test_a_load_that_fails_leaves_the_engine_silent():
    """Weights that were released are lost: nothing may be generated until an update has arrived whole."""

    async def broken(version):
        raise EngineError("the update broke off", code="ENG83")

    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        trainer.publish = broken
        with pytest.raises(EngineError):
            await turn(engine, trainer, devices, 1)
        return engine, device.log

    engine, log = asyncio.run(run())
    assert log.count("resume") == 1
    assert engine.lost


def test_a_second_training_before_any_load_takes_nothing_twice():
    async def run():
        device = Device()
        engine, trainer, devices = await lent(device)
        async with devices.syncing():
            await engine.load(await trainer.publish(0))
        for _ in range(2):
            async with devices.training():
                await trainer.step(Nothing())
        async with devices.syncing():
            await engine.load(await trainer.publish(2))
        return device.held

    assert asyncio.run(run()) == {("engine", "kv"): 40, ("engine", "weights"): 10}


@pytest.mark.parametrize("make", [DedicatedDevices, lambda: TimeSharing(FakeEngine())], ids=["free", "quiet"])
def test_other_turns_cost_nothing(make):
    async def run():
        devices = make()
        async with devices.training():
            pass
        async with devices.syncing():
            pass
        return devices.metrics

    assert asyncio.run(run()) == {}


def test_a_trainer_whose_state_was_released_is_saved_restored_and_exported(tmp_path):
    """Checkpoints are due after the turn, when the engine holds the device again."""
    path = tiny_model(tmp_path / "model")
    config = load_config(None, ["--hf-checkpoint", str(path), "--dtype", "float32", "--device", "cpu"])
    thread = TorchThread(1)

    async def run():
        trainer = FsdpTrainer(config, load_plugins(config), ModelFolder.open(path), thread=thread, device="cpu")
        await trainer.begin(config)
        want = await trainer.fingerprint()
        await trainer.release({"gradients", "optimizer", "parameters"})
        await trainer.save(tmp_path / "saved")
        assert await trainer.saved()
        await trainer.restore(tmp_path / "saved")
        await trainer.export(tmp_path / "final")
        assert await trainer.fingerprint() == want

    try:
        asyncio.run(run())
    finally:
        thread.close()
    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_whose_tensors_went_elsewhere_and_back_trains_on_bit_for_bit(dtype, tmp_path):
    """What a GPU's trainer does at each turn, with copies in memory in the place of the host's."""
    folder = tiny_model(tmp_path / "model")
    config, batch = made.config_of(folder, dtype=dtype, kl_loss_coef=0.1), made.batch_of()
    thread = TorchThread(1)

    def elsewhere(worker):
        for learner in worker.learners():
            learner.module._apply(lambda tensor: tensor.clone())
            for moments in (learner.optimizer.moment1, learner.optimizer.moment2):
                moments |= {name: tensor.clone() for name, tensor in moments.items()}

    async def run():
        moved, stayed = (
            FsdpTrainer(config, load_plugins(config), ModelFolder.open(folder), thread=thread, device="cpu")
            for _ in range(2)
        )
        for one in (moved, stayed):
            await one.begin(config)
        batch.columns["reference"] = (await moved.score(batch, frozenset({"reference"})))["reference"]["log_probs"]
        for _ in range(3):
            assert (await moved.step(batch))["loss"] == (await stayed.step(batch))["loss"]
            await moved.score(batch, frozenset({"policy", "reference"}))
            await thread.run(elsewhere, moved._worker)
            assert await moved.fingerprint() == await stayed.fingerprint()

    try:
        asyncio.run(run())
    finally:
        thread.close()
