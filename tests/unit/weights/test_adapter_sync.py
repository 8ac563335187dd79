"""Adapters from the FSDP trainer to engines beside the base: what crosses, what is served, and what does not arrive."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked_channel import fork

from slime_core.clusters.channel import ProcessChannel
from slime_core.clusters.embedded import embedded_engine
from slime_core.clusters.engine_process import EngineProcess
from slime_core.config.load import load_config
from slime_core.engines.local import LocalEngine
from slime_core.errors import EngineError
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.contracts import sample_group
from slime_core.testing.fakes import FakeEngine
from slime_core.threads import TorchThread
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder
from slime_core.weights.update import sync_weights

pytestmark = pytest.mark.unit

KEYS = (
    "kl_loss_coef=0.01",
    "lora_rank=4",
    "lora_alpha=16.0",
    "lora_sync=adapter",
    "lora_target_modules=['q_proj','v_proj','down_proj']",
)
NAMES = ("solver", "critic")


def step_batch():
    batch = make_batch(0, "main", [sample_group(0), sample_group(1, fan_out=True)])
    batch = dataclasses.replace(batch, routed_experts=None)
    batch.columns["advantages"] = np.linspace(-1, 1, len(batch.loss_mask)).astype(np.float32)
    batch.columns["reference"] = np.full_like(batch.loss_mask, -2.0)
    return batch


class Sync:
    """A trainer with two adapters that differ, an engine, and the updates between them."""

    def __init__(self, config, trainer, engine):
        self.config, self.trainer, self.engine = config, trainer, engine
        self.updates, publish = [], trainer.publish

        async def recorded(version, route=None):
            self.updates.append(await publish(version, route))
            return self.updates[-1]

        trainer.publish = recorded

    @property
    def adapters(self):
        return self.trainer._worker.policy.adapters

    def move(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.adapters.parameters().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    async def differences(self):
        """Of log-probs of a text on both sides, by adapter; "base" is the trainer's reference."""
        batch, apart = step_batch(), {}
        for name in (*self.adapters.names, "base"):
            role = "reference" if name == "base" else "policy"
            models = [self.adapters.names[0] if name == "base" else name] * len(batch)
            columns = await self.trainer.score(dataclasses.replace(batch, models=models), frozenset({role}))
            start, end = batch.response_offsets[:2]
            tokens = batch.tokens[batch.offsets[0] : batch.offsets[1]].tolist()
            served = await self.engine.score(tokens, len(tokens) - int(end - start), adapter=name)
            apart[name] = float(np.abs(columns[role]["log_probs"][start:end] - served).max())
        return apart


async def syncing(go, tmp_path, *, apart=False, dtype="float32", keys=(), pages=False, **shape):
    path = tiny_model(tmp_path / "model", **shape)
    flags = ["--hf-checkpoint", str(path), "--cpu-threads", "1", "--dtype", dtype, "--rollout-max-response-len", "32"]
    config = load_config(None, [*flags, "--device", "cpu", *(f"train.{key}" for key in (*KEYS, *keys))])
    thread, folder = TorchThread(1), ModelFolder.open(path)
    async with AsyncExitStack() as stack:
        stack.callback(thread.close)
        trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device="cpu")
        await trainer.begin(config)
        if apart:
            engine = EngineProcess(config, run_dir=tmp_path, epoch=1, thread=thread)
            (tmp_path / "log").mkdir()
            await stack.enter_async_context(engine)
        elif pages:
            engine = LocalEngine(folder, slots=2, context_len=64, dtype=dtype, device="cpu", thread=thread, paged=True)
            stack.push_async_callback(engine.close)
        else:
            engine = await stack.enter_async_context(embedded_engine(config, folder, thread))
        return await go(Sync(config, trainer, engine))


@pytest.mark.parametrize(
    ("apart", "dtype"), [(False, "float32"), (False, "bfloat16"), (True, "float32")], ids=["here", "bfloat16", "apart"]
)
def test_the_base_crosses_once_and_the_engine_computes_what_is_trained(tmp_path, apart, dtype, monkeypatch):
    monkeypatch.setattr(ProcessChannel, "start", classmethod(fork))

    async def go(sync):
        sync.move(0)
        await sync_weights(sync.trainer, sync.engine, 0)
        seen = [await sync.differences()]
        await sync.trainer.step(step_batch())
        sync.move(1)
        await sync_weights(sync.trainer, sync.engine, 1)
        seen.append(await sync.differences())
        await sync.engine.pause("retract")
        await sync.engine.release({"kv", "weights"})
        await sync.engine.reacquire({"kv", "weights"})
        await sync_weights(sync.trainer, sync.engine, 2)
        await sync.engine.resume()
        seen.append(await sync.differences())
        return sync.updates, seen

    updates, seen = asyncio.run(syncing(go, tmp_path, apart=apart, dtype=dtype, keys=[f"lora_adapters={[*NAMES]}"]))
    assert [bool(update.tensors) for update in updates] == [True, False, True]
    assert all(tuple(update.adapters) == NAMES for update in updates)
    limit = 2e-5 if dtype == "float32" else 0.1
    assert max(max(apart.values()) for apart in seen) < limit, seen


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
def test_a_base_in_4_bits_is_the_trainers_own_storage(tmp_path, pages):
    async def go(sync):
        sync.move(0)
        await sync_weights(sync.trainer, sync.engine, 0)
        seen = [await sync.differences()]
        sync.move(1)
        await sync_weights(sync.trainer, sync.engine, 1)
        seen.append(await sync.differences())
        served = sync.engine._scheduler.served
        shared = [
            name
            for name, one in served._twin.model.named_parameters()
            if isinstance(one, QuantisedWeight)
            and one.numbers.data_ptr() == sync.trainer._worker.policy.hf.get_parameter(name).numbers.data_ptr()
        ]
        return served.plan.name, shared, seen

    plan, shared, seen = asyncio.run(syncing(go, tmp_path, keys=["base_weights=nf4"], pages=pages, hidden=64))
    assert plan == "lean"
    assert len(shared) >= 7, "a layer has seven linear layers"
    assert max(max(apart.values()) for apart in seen) < 2e-5


def test_a_base_that_is_moved_is_not_sent_as_merged_weights(tmp_path):
    async def go(sync):
        sync.move(0)
        before = {name: tensor.clone() for name, tensor in sync.trainer._worker.policy.base().items()}
        await sync_weights(sync.trainer, sync.engine, 0)
        return before, sync.updates[0].tensors

    before, sent = asyncio.run(syncing(go, tmp_path))
    assert sent.keys() >= before.keys()
    assert not any("lora" in name for name in sent)
    assert all(torch.equal(sent[name], tensor) for name, tensor in before.items())


def _stale(update, last):
    return replace(update, adapters=update.adapters | {"critic": last.adapters["critic"]})


def _swapped(update, last):
    solver, critic = (update.adapters[name] for name in NAMES)
    return replace(update, adapters={"solver": critic, "critic": solver})


def _half(update, last):
    new, old = update.adapters["critic"].tensors, last.adapters["critic"].tensors
    mixed = {name: old[name] if ".lora_B." in name else one for name, one in new.items()}
    return replace(update, adapters=update.adapters | {"critic": replace(update.adapters["critic"], tensors=mixed)})


FAULTS = {
    "stale": (_stale, "critic", "of another version or damaged"),
    "swapped": (_swapped, "solver", "those of adapter critic: swapped on the way"),
    "A without B": (_half, "critic", "one half of the adapter did not arrive"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_reach_the_engine_is_caught_at_the_next_update(tmp_path, fault):
    change, name, reason = FAULTS[fault]

    async def go(sync):
        sync.move(0)
        await sync_weights(sync.trainer, sync.engine, 0)
        last = sync.updates[0]
        tensors = {n: {k: t.clone() for k, t in one.tensors.items()} for n, one in last.adapters.items()}
        last.adapters = {n: replace(one, tensors=tensors[n]) for n, one in last.adapters.items()}
        sync.move(1)
        load = sync.engine.load
        sync.engine.load = lambda update: load(change(update, last))
        with pytest.raises(EngineError) as caught:
            await sync_weights(sync.trainer, sync.engine, 1)
        return caught.value

    error = asyncio.run(syncing(go, tmp_path, keys=[f"lora_adapters={[*NAMES]}"]))
    assert error.code == "ENG83"
    assert f"adapter {name} on the engine" in error.what
    assert reason in error.why


def test_an_engine_that_drops_adapters_is_caught_at_the_first_update(tmp_path):
    async def go(sync):
        engine = FakeEngine()
        load = engine.load
        engine.load = lambda update: load(replace(update, adapters={}))
        with pytest.raises(EngineError) as caught:
            await sync_weights(sync.trainer, engine, 0)
        return caught.value

    error = asyncio.run(syncing(go, tmp_path))
    assert error.code == "ENG83"
    assert "adapter default on the engine" in error.what
    assert "did not reach it" in error.why
