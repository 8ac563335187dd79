"""An engine that is absent and a trainer that is idle: what they refuse, and what they hand out."""

import asyncio
from types import SimpleNamespace

import pytest

from slime_core.clusters.debug import AbsentEngine, IdleTrainer
from slime_core.errors import EngineError, TrainerError
from slime_core.protocols import Engine, Trainer
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(
            GenerateRequest(id="a", tokens=[1], params=SamplingParams(max_new_tokens=1), seed=0)
        ),
        lambda engine: engine.score([1, 2], 1),
        lambda engine: engine.load(WeightUpdate(version=1, epoch=0, transport="tensors")),
    ],
    ids=["generate", "score", "load"],
)
def test_an_absent_engine_refuses_with_the_key_and_the_fix(call):
    engine = AbsentEngine()
    assert isinstance(engine, Engine)
    with pytest.raises(EngineError, match="ENG84") as caught:
        asyncio.run(call(engine))
    assert "--no-debug-train-only" in str(caught.value)


def test_an_absent_engine_is_quiet():
    async def go():
        engine = AbsentEngine()
        await engine.pause("keep")
        await engine.resume()
        await engine.release({"kv"})
        await engine.reacquire({"kv"})
        return await engine.abort(["a"]), await engine.fingerprints()

    assert asyncio.run(go()) == ([], {})


def test_an_idle_trainer_hands_out_the_starting_weights_and_trains_nothing(tmp_path):
    folder = ModelFolder.open(str(tiny_model(tmp_path / "model")))
    thread = TorchThread(1)
    config = SimpleNamespace(seed=3)

    async def go():
        trainer = IdleTrainer(config, folder, thread)
        assert isinstance(trainer, Trainer)
        await trainer.begin(config)
        update = await trainer.publish(0)
        await trainer.save(tmp_path / "state")
        assert (await trainer.saved(), await trainer.fingerprint()) == ({}, "")
        await trainer.restore(tmp_path / "state")
        for refused in (
            trainer.step(None),
            trainer.score(None, frozenset()),
            trainer.verify(None),
            trainer.export(tmp_path),
        ):
            with pytest.raises(TrainerError, match="this run does not train"):
                await refused
        return update

    try:
        update = asyncio.run(go())
        wanted = thread.call(folder.build_model, dtype="float32", seed=3).state_dict()
    finally:
        thread.close()
    assert update.version == 0
    assert set(update.tensors) == set(wanted)
    assert all((update.tensors[name] == wanted[name]).all() for name in wanted)
