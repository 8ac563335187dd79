"""The fakes keep every promise of the protocols, and a fake that breaks one is caught."""

import asyncio

import numpy as np
import pytest

from durability.fake_trainer import FakeTrainer, RankedTrainer
from durability.ledger_contract import LEDGER_CHECKS
from durability.memory_ledger import MemoryLedger
from slime_core.config.schema import Config
from slime_core.protocols import Engine, Ledger, Trainer
from slime_core.testing.contracts import ENGINE_CHECKS, TRAINER_CHECKS, EngineCase, TrainerCase, sample_group
from slime_core.testing.fakes import FakeEngine
from slime_core.types import AdapterUpdate, WeightUpdate

pytestmark = pytest.mark.unit


def _update(version):
    return WeightUpdate(version=version, epoch=1, transport="tensors", tensors={"w": np.ones(3)})


def _adapters():
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    return {
        who: AdapterUpdate(config={"r": 1}, tensors={name: np.full((1, 3), value)})
        for who, value in (("solver", 1.0), ("critic", 2.0))
    }


def _engine_case(engine):
    return EngineCase(engine=engine, update=_update, prompt=[1, 2, 3], adapters=_adapters)


def _trainer_case(trainer, folder):
    from slime_core.trainers.batch import make_batch

    batch = make_batch(0, "main", [sample_group(0), sample_group(1, fan_out=True)])
    batch.columns["advantages"] = np.linspace(-1, 1, len(batch.loss_mask)).astype(np.float32)
    return TrainerCase(trainer=trainer, stage=Config(), batch=batch, folder=folder)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_fake_engine(check):
    asyncio.run(check(_engine_case(FakeEngine())))


@pytest.mark.parametrize("make", [FakeTrainer, RankedTrainer], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("check", TRAINER_CHECKS, ids=lambda check: check.__name__)
def test_fake_trainer(check, make, tmp_path):
    asyncio.run(check(_trainer_case(make(), tmp_path)))


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_memory_ledger(check):
    asyncio.run(check(MemoryLedger()))


def test_fakes_have_every_method_of_their_protocol():
    assert isinstance(FakeEngine(), Engine)
    assert isinstance(FakeTrainer(), Trainer)
    assert isinstance(MemoryLedger(), Ledger)


class StaleEngine(FakeEngine):
    """Takes the tensors but goes on under the first version's name."""

    async def load(self, update):
        version = self.version
        await super().load(update)
        self.version = version if version >= 0 else update.version


class ForgetfulEngine(FakeEngine):
    """Draws from a stateful generator."""

    def _draw(self, request, out):
        super()._draw(request, out)
        out.tokens[-1] = (out.tokens[-1] + len(self.served)) % self.vocab_size


class WaitingTrainer(FakeTrainer):
    """A publish that waits for the engine."""

    async def publish(self, version):
        update = await super().publish(version)
        await self._transfer
        return update


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (StaleEngine, "engine_stamps_the_version_it_serves"),
        (ForgetfulEngine, "engine_repeats_itself_for_the_same_seed"),
    ],
    ids=["stale version", "stateful draws"],
)
def test_a_broken_engine_is_caught(broken, check):
    checks = {c.__name__: c for c in ENGINE_CHECKS}
    with pytest.raises(AssertionError):
        asyncio.run(checks[check](_engine_case(broken())))


def test_a_publish_that_waits_for_the_engine_is_caught(tmp_path, monkeypatch):
    from slime_core.testing import contracts

    monkeypatch.setattr(contracts, "PATIENCE", 0.2)
    with pytest.raises(TimeoutError):
        asyncio.run(
            contracts.trainer_publish_returns_before_any_engine_loads(
                _trainer_case(WaitingTrainer(rendezvous=True), tmp_path)
            )
        )
