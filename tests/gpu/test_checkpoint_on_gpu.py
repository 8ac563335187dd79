"""Checkpoints on a GPU: what is copied while training goes on is the state of its own moment."""

import asyncio

import pytest
import torch
import trainer_bench as made

from durability.memory_ledger import MemoryLedger
from slime_core.checkpoint import CheckpointMetadata, Checkpoints
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.gpu

ABOUT = CheckpointMetadata(state={}, config={}, plugins="", machine={}, epoch=1)


def trainer_on(device, folder, thread, **train):
    config = made.config_of(folder, **train)
    return FsdpTrainer(config, load_plugins(config), ModelFolder.open(folder), thread=thread, device=device), config


@pytest.fixture
def thread():
    one = TorchThread(1)
    yield one
    one.close()


def test_steps_right_after_the_copy_began_do_not_reach_the_checkpoint(tmp_path, thread):
    folder = tiny_model(tmp_path / "model", hidden=512, layers=4)
    settings = {"dtype": "bfloat16", "kl_loss_coef": 0.1}
    one, config = trainer_on("cuda", folder, thread, **settings)
    batch = made.batch_of()

    async def run():
        await one.begin(config)
        batch.columns["reference"] = (await one.score(batch, frozenset({"reference"})))["reference"]["log_probs"]
        checkpoints, prints = Checkpoints(tmp_path / "checkpoints", keep=9, note=print), []
        for version in range(1, 5):
            await one.step(batch)
            prints.append(await one.fingerprint())
            await checkpoints.begin(version, ABOUT, one, MemoryLedger())
            await one.score(batch, frozenset({"reference"}))  # swaps the policy's weights while the copy runs
            for _ in range(3):
                await one.step(batch)
        await checkpoints.wait()
        for version in range(1, 5):
            await one.restore(tmp_path / "checkpoints" / f"step-{version}" / "trainer")
            assert await one.fingerprint() == prints[version - 1]

    asyncio.run(run())


def test_host_memory_is_locked_once_and_before_the_first_save(tmp_path, thread):
    one, config = trainer_on("cuda", tiny_model(tmp_path / "model"), thread)

    async def run():
        await one.begin(config)
        one._worker.staging._pool.submit(int).result()  # behind the pages
        blocks = list(one._worker.staging._blocks)
        assert blocks
        assert all(block.is_pinned() for block in blocks)
        for number in range(3):
            await one.step(made.batch_of())
            await one.save(tmp_path / f"saved-{number}")
            await one.saved()
        assert [b.data_ptr() for b in one._worker.staging._blocks] == [b.data_ptr() for b in blocks]

    asyncio.run(run())


def test_a_full_device_can_be_saved_from_once_the_state_was_given_away(tmp_path, thread):
    one, config = trainer_on("cuda", tiny_model(tmp_path / "model", hidden=2048, layers=8), thread)
    others = []

    async def run():
        await one.begin(config)
        await one.step(made.batch_of())
        print_ = await one.fingerprint()
        await one.release({"parameters", "optimizer", "gradients"})
        others.append(torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda"))
        await one.save(tmp_path / "saved")
        await one.saved()
        others.clear()
        torch.cuda.empty_cache()
        await one.restore(tmp_path / "saved")
        assert await one.fingerprint() == print_

    asyncio.run(run())


def test_a_fingerprint_is_that_of_a_cpu(tmp_path, thread):
    folder = tiny_model(tmp_path / "model")

    async def run():
        prints = []
        for device in ("cuda", "cpu"):
            one, config = trainer_on(device, folder, thread)
            await one.begin(config)
            prints.append(await one.fingerprint())
        assert prints[0] == prints[1]

    asyncio.run(run())


def test_training_goes_on_bit_for_bit_on_a_gpu(tmp_path, thread):
    folder = tiny_model(tmp_path / "model")
    batch = made.batch_of()

    async def run():
        one, config = trainer_on("cuda", folder, thread, dtype="bfloat16")
        await one.begin(config)
        await one.step(batch)
        await one.save(tmp_path / "saved")
        await one.saved()
        state = torch.cuda.get_rng_state()
        want = [await one.step(batch) for _ in range(2)], await one.fingerprint()
        torch.cuda.manual_seed(99)
        other, config = trainer_on("cuda", folder, thread, dtype="bfloat16")
        await other.begin(config)
        await other.restore(tmp_path / "saved")
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert ([await other.step(batch) for _ in range(2)], await other.fingerprint()) == want

    asyncio.run(run())
