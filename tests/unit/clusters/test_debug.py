"""An engine that is absent and a trainer that is idle: what they refuse, and what they hand out."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_core.clusters.debug import AbsentEngine, IdleTrainer
from slime_core.config.schema import Config
from slime_core.errors import EngineError, TrainerError
from slime_core.protocols import Engine, Trainer
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, Piece, RankTensor, SamplingParams, WeightRoute, WeightUpdate
from slime_core.weights import hashing
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
    config = Config(seed=3)

    async def go():
        trainer = IdleTrainer(config, folder, thread, device="cpu", epoch=4)
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


@pytest.mark.parametrize("transport", ["disk", "tensor"])
@pytest.mark.parametrize("init_weights", ["load", "random"])
def test_an_idle_trainer_sends_the_starting_weights_by_the_engines_route(tmp_path, transport, init_weights):
    """debug_rollout_only with servers: they get the weights that a trainer would have begun with, and their sums."""
    folder = ModelFolder.open(str(tiny_model(tmp_path / "model")), init_weights=init_weights)
    thread = TorchThread(1)
    names = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv"]
    held = RankTensor(
        name="model.layers.0.self_attn.qkv_proj.weight", pieces=tuple(Piece(name=name) for name in names)
    )
    route = WeightRoute(transport=transport, dtype="bfloat16", folder=str(tmp_path / "weights"), checks=(held,))

    async def go():
        config = Config(seed=3, rollout={"rollout_engine": "sglang"})
        trainer = IdleTrainer(config, folder, thread, device="cpu", epoch=4)
        updates = [await trainer.publish(0, route), await trainer.publish(0, route)]
        await trainer.release({"parameters"})
        return updates

    try:
        first, again = asyncio.run(go())
        wanted = thread.call(folder.build_model, dtype="float32", seed=3).state_dict()
    finally:
        thread.close()
    fused = torch.cat([wanted[name].bfloat16() for name in names])
    for update in (first, again):
        assert (update.version, update.epoch, update.transport, dict(update.tensors)) == (0, 4, transport, {})
        assert update.fingerprints == {held.key: hashing.checksum(fused)}
    if transport == "disk":
        stored = load_file(str(Path(first.handle["folder"]) / "model.safetensors"))
        assert all(torch.equal(stored[name], wanted[name].bfloat16()) for name in stored)
        assert json.loads((Path(first.handle["folder"]) / "config.json").read_text())["dtype"] == "bfloat16"
    else:
        assert first.handle == again.handle  # the buffer is kept until memory is given back
