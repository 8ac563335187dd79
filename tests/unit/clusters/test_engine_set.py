"""Several engines as one: every promise of an engine, work spread by tokens, and no engine left behind."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from slime_core.clusters.embedded import embedded_engine
from slime_core.clusters.engine_set import EngineSet, Loads, engine_reservation
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import load_config
from slime_core.errors import EngineError
from slime_core.testing import tiny_model
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.testing.fakes import FakeEngine
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.open(tiny_model(tmp_path_factory.mktemp("model") / "m", hidden=32))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_a_set_of_engines_keeps_the_engine_contract(check, folder):
    model = folder.build_model("float32")
    flags = ("--hf-checkpoint", str(folder.path), "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1")
    config = resolve_machine(load_config(None, [*flags, "--rollout-slots", "4", "--rollout-max-response-len", "8"]))

    def update(version):
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return WeightUpdate(version=version, epoch=1, transport="tensors", tensors=tensors)

    async def run():
        async with AsyncExitStack() as stack:
            thread = TorchThread(1)
            stack.callback(thread.close)
            made = [
                await stack.enter_async_context(embedded_engine(config, folder, thread, epoch=1)) for _ in range(2)
            ]
            await check(EngineCase(engine=EngineSet(made), update=update, prompt=[3, 4, 5]))

    asyncio.run(run())


def request(name, tokens):
    return GenerateRequest(id=name, tokens=[1, 2], params=SamplingParams(max_new_tokens=tokens), seed=7)


def test_a_request_goes_where_the_fewest_tokens_are_owed_and_an_abort_finds_it():
    async def run():
        engines = [FakeEngine(vocab_size=16, stop_token=99) for _ in range(2)]
        both = EngineSet(engines)
        await both.load(WeightUpdate(version=3, epoch=1, transport="tensors"))
        assert [engine.version for engine in engines] == [3, 3] == [both.version] * 2
        tasks = [asyncio.create_task(both.generate(request(n, k))) for n, k in (("long", 400), ("a", 50), ("b", 50))]
        while len(engines[1]._running) < 2:
            await asyncio.sleep(0)
        assert set(engines[0]._running) == {"long"}
        assert set(engines[1]._running) == {"a", "b"}
        (part,) = await both.abort(["long"])
        assert (part.id, part.finish) == ("long", "abort")
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("count", [1, 3, 17])
def test_the_least_loaded_is_the_one_that_a_search_finds(count):
    draw, loads, owed = random.Random(count), Loads(count), []
    for _ in range(2000):
        if owed and draw.random() < 0.5:
            number, cost = owed.pop(draw.randrange(len(owed)))
            loads.add(number, -cost)
        else:
            number, cost = loads.least(), draw.choice([0, 1, 1, 7, 300])
            assert number == min(range(count), key=loads.now.__getitem__)
            loads.add(number, cost)
            owed.append((number, cost))


def test_an_engine_with_other_weights_than_the_first_is_named_with_its_tensors():
    class Holds(FakeEngine):
        held: dict = {}  # noqa: RUF012

        async def fingerprints(self):
            return self.held

    async def run():
        engines = [Holds(), Holds(), Holds()]
        for engine in engines:
            engine.held = {"w": "1", "v": "2"}
        assert await EngineSet(engines).fingerprints() == {"w": "1", "v": "2"}
        engines[2].held = {"w": "1", "v": "3"}
        await EngineSet(engines).fingerprints()

    with pytest.raises(EngineError, match="engines 0 and 2") as caught:
        asyncio.run(run())
    assert (caught.value.code, caught.value.where) == ("ENG83", "v")


def test_an_engine_that_fails_to_load_is_reported_after_all_have_answered():
    class Fails(FakeEngine):
        async def load(self, update):
            raise EngineError("it does not fit", code="ENG86")

    async def run():
        engines = [Fails(), FakeEngine()]
        with pytest.raises(EngineError, match="ENG86"):
            await EngineSet(engines).load(WeightUpdate(version=1, epoch=1, transport="tensors"))
        assert engines[1].version == 1

    asyncio.run(run())


def test_a_held_engine_keeps_its_weights_and_gets_no_requests_until_the_next_update_after_it():
    def update(version):
        return WeightUpdate(version=version, epoch=1, transport="tensors", tensors={"w": float(version)})

    async def run():
        engines = [FakeEngine(vocab_size=16, stop_token=99) for _ in range(3)]
        them = EngineSet(engines)
        await them.load(update(1))
        begun = asyncio.create_task(them.generate(request("begun", 4)))
        await asyncio.sleep(0)
        async with them.reserve() as held:
            assert held is engines[1]  # the first owes tokens
            await them.load(update(2))
            assert [engine.version for engine in engines] == [2, 1, 2]
            assert them.version == 2
            assert await them.fingerprints() == await engines[2].fingerprints() != await held.fingerprints()
            await asyncio.gather(begun, *(them.generate(request(str(i), 4)) for i in range(6)))
            assert (await held.generate(request("eval", 4))).versions == [1] * 4
            assert held.served == ["eval"]
        await asyncio.gather(*(them.generate(request(f"more {i}", 4)) for i in range(6)))
        assert held.served == ["eval"], "it has old weights"
        await them.load(update(3))
        assert [engine.version for engine in engines] == [3, 3, 3]
        await asyncio.gather(*(them.generate(request(f"last {i}", 4)) for i in range(3)))
        assert len(held.served) == 2

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_engine_that_missed_no_update_serves_again_at_once_and_one_that_comes_back_during_one_does_not():
    class Gate(FakeEngine):
        async def load(self, update):
            await super().load(update)
            if update.version == 2:
                loading.set()
                await rest.wait()

    loading, rest = asyncio.Event(), asyncio.Event()

    async def run():
        engines = [Gate(vocab_size=16, stop_token=99), FakeEngine(vocab_size=16, stop_token=99)]
        them = EngineSet(engines)
        await them.load(WeightUpdate(version=1, epoch=1, transport="tensors"))
        async with them.reserve():
            pass
        await asyncio.gather(*(them.generate(request(str(i), 4)) for i in range(2)))
        assert [len(engine.served) for engine in engines] == [1, 1]
        busy = asyncio.create_task(them.generate(request("busy", 400)))
        await asyncio.sleep(0)
        async with them.reserve() as held:
            assert held is engines[1]
            load = asyncio.create_task(them.load(WeightUpdate(version=2, epoch=1, transport="tensors")))
            await loading.wait()
        rest.set()
        await load
        await asyncio.gather(busy, *(them.generate(request(f"more {i}", 4)) for i in range(2)))
        assert len(held.served) == 1
        assert them.version == 2

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("state", ["one engine", "held already", "paused"])
def test_an_engine_is_held_only_where_another_serves(state):
    async def run():
        async with AsyncExitStack() as stack:
            them = EngineSet([FakeEngine() for _ in range(1 if state == "one engine" else 2)])
            await them.load(WeightUpdate(version=1, epoch=1, transport="tensors"))
            if state == "held already":
                await stack.enter_async_context(them.reserve())
            if state == "paused":
                await them.pause("keep")
            assert engine_reservation(them) is None
            with pytest.raises(EngineError, match="engines can be reserved"):
                await stack.enter_async_context(them.reserve())

    asyncio.run(run())


def test_an_engine_that_returns_while_the_others_are_paused_is_paused():
    async def run():
        engines = [FakeEngine(vocab_size=16, stop_token=99) for _ in range(2)]
        them = EngineSet(engines)
        await them.load(WeightUpdate(version=1, epoch=1, transport="tensors"))
        async with them.reserve() as held:
            await them.pause("keep")
        tasks = [asyncio.create_task(them.generate(request(name, 4))) for name in ("a", "b")]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not held.served
        await them.resume()
        await asyncio.gather(*tasks)
        assert len(held.served) == 1

    asyncio.run(asyncio.wait_for(run(), 60))
