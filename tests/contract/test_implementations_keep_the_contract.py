"""The embedded engine, the FSDP trainer and the SQLite ledger keep every promise of the protocols, on CPU and on a GPU."""

import asyncio
import dataclasses

import numpy as np
import pytest
from cluster_case import keeps
from forked_channel import start_forked

from durability.ledger_contract import LEDGER_CHECKS
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.load import load_config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.contracts import (
    CLUSTER_CHECKS,
    ENGINE_CHECKS,
    TRAINER_CHECKS,
    EngineCase,
    TrainerCase,
    sample_group,
)
from slime_core.threads import TorchThread
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = ["float32", "bfloat16"]


def by_name(check):
    return check.__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=by_name)
def test_local_engine(check, device, dtype, tmp_path):
    folder = ModelFolder.open(tiny_model(tmp_path / "model"))
    model = folder.build_model("float32").to(device)

    def update(version):
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return WeightUpdate(version=version, epoch=1, transport="tensors", tensors=tensors)

    async def run():
        from slime_core.engines.local import LocalEngine

        thread = TorchThread(1)
        engine = LocalEngine(folder, slots=4, context_len=96, dtype=dtype, device=device, thread=thread, epoch=1)
        try:
            await check(EngineCase(engine=engine, update=update, prompt=[3, 4, 5]))
        finally:
            await engine.close()
            thread.close()

    asyncio.run(run())


def _batch():
    batch = make_batch(0, "main", [sample_group(0), sample_group(1, fan_out=True)])
    batch = dataclasses.replace(batch, routed_experts=None)
    batch.columns["advantages"] = np.linspace(-1, 1, len(batch.loss_mask)).astype(np.float32)
    return batch


def _config(folder, *flags):
    return load_config(None, ["--hf-checkpoint", str(folder), "--lr", "1e-3", "--cpu-threads", "1", *flags])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", TRAINER_CHECKS, ids=by_name)
def test_fsdp_trainer(check, device, dtype, tmp_path):
    path = tiny_model(tmp_path / "model")
    config = _config(path, "--dtype", dtype, "--device", device)

    async def run():
        thread = TorchThread(1)
        trainer = FsdpTrainer(config, load_plugins(config), ModelFolder.open(path), thread=thread, device=device)
        try:
            await check(TrainerCase(trainer=trainer, stage=config, batch=_batch(), folder=tmp_path / "saved"))
        finally:
            thread.close()

    asyncio.run(run())


def test_two_ranks_of_the_fsdp_trainer(tmp_path):
    path = tiny_model(tmp_path / "model")
    config = _config(
        path, "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--actor-num-gpus-per-node", "2"
    )

    async def run():
        ranks = RankTrainer(config, load_plugins(config), world=2, run_dir=tmp_path, start=start_forked)
        async with ranks as trainer:
            for check in TRAINER_CHECKS:
                await check(
                    TrainerCase(trainer=trainer, stage=config, batch=_batch(), folder=tmp_path / check.__name__)
                )

    asyncio.run(run())


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=by_name)
def test_sqlite_ledger(check, tmp_path):
    async def run():
        ledger = SqliteLedger(tmp_path)
        try:
            await check(ledger)
        finally:
            await ledger.close()

    asyncio.run(run())


APART = ("--max-staleness", "1", "--no-colocate", "--actor-num-gpus-per-node", "2")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="one process"),
        pytest.param(APART, id="ranks and an engine apart", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("check", CLUSTER_CHECKS, ids=by_name)
def test_local_cluster(check, flags, tmp_path):
    asyncio.run(keeps(check, tmp_path, *flags))
