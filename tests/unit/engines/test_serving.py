"""The asyncio side: pauses, aborts, cancelled callers, memory, failures, and an end that leaves nothing."""

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from itertools import product

import pytest

from slime_core.errors import EngineError
from slime_core.protocols import Engine
from slime_core.testing import contracts
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase

pytestmark = pytest.mark.unit


BY_DAY = (contracts.engine_repeats_itself_for_the_same_seed, contracts.engine_keeps_partial_tokens_of_an_abort)
"""What is checked by day of a model whose every token computes its sequence again."""
SLOW = [pytest.param("mamba", check, marks=[pytest.mark.nightly] * (check not in BY_DAY)) for check in ENGINE_CHECKS]


@pytest.mark.parametrize(
    ("name", "check"),
    [*product(("qwen3", "neox"), ENGINE_CHECKS), *SLOW],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_contract_of_engines_is_kept(bench, name, check):
    async def go(b):
        async with b.engine(load=False) as engine:
            assert isinstance(engine, Engine)
            await check(EngineCase(engine=engine, update=b.update, prompt=[5, 6, 7]))

    bench(name).run(go)


async def running(engine, requests, tokens=5):
    """Start requests and wait until the first has drawn some tokens."""
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    while not engine._scheduler._slots.active.any() or engine._scheduler._slots.position.max() < 3 + tokens:
        await asyncio.sleep(0.001)  # 0 would take the interpreter from the torch thread
    return tasks


async def settle():
    """Let everything happen that can."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_pause_holds_requests_and_changes_no_bit(bench, ask, mode):
    async def go(b):
        async with b.engine(slots=2) as engine:
            asked = [ask(str(i), new=100) for i in range(4)]
            want = await asyncio.gather(*(engine.generate(r) for r in asked))
            tasks = await running(engine, asked)
            await engine.pause(mode)
            active = engine._scheduler._slots.active.sum()
            assert active == (2 if mode == "keep" else 0)
            before = engine._scheduler._slots.position.copy()
            late = asyncio.create_task(engine.generate(ask("late")))
            await settle()
            assert (engine._scheduler._slots.position == before).all()
            assert not any(task.done() for task in [*tasks, late])
            await engine.resume()
            got = await asyncio.gather(*tasks)
            assert [(one.tokens, one.log_probs) for one in got] == [(one.tokens, one.log_probs) for one in want]
            assert len((await late).tokens) == 12

    bench().run(go)


def test_a_pause_on_a_cpu_gives_memory_to_the_trainer(bench, ask):
    """The lean plan's copies of weights, and a cache in which nothing runs; the first use makes both again."""

    async def go(b):
        async with b.engine() as engine:
            one = await engine.generate(ask())
            served = engine._scheduler.served
            await engine.pause("keep")
            assert served.cache.keys == []
            assert served.plan._head._weight.numel() == 0
            scored = await engine.score([*ask().tokens, *one.tokens], 3)
            assert scored.tolist() == one.plain_log_probs
            await engine.pause("keep")
            await engine.resume()
            again = await engine.generate(ask())
            assert (again.tokens, again.log_probs) == (one.tokens, one.log_probs)
            await engine.pause("keep")
            await engine.load(b.update(1))
            assert served.plan._head._weight.numel() > 0
            await engine.resume()

    bench().run(go)


def test_a_pause_that_aborts_ends_running_waiting_and_new_requests_alike(bench, ask):
    async def go(b):
        async with b.engine(slots=2) as engine:
            asked = [ask(str(i), new=100) for i in range(4)]
            want = await asyncio.gather(*(engine.generate(r) for r in asked))
            tasks = await running(engine, asked)
            unseen = asyncio.create_task(engine.generate(ask("unseen")))
            await asyncio.sleep(0)
            await engine.pause("abort")
            got = await asyncio.gather(*tasks, unseen)
            assert [one.finish for one in got] == ["abort"] * 5
            assert (got[4].tokens, got[4].text) == ([], "")
            for one, whole in zip(got, want, strict=False):
                assert one.tokens == whole.tokens[: len(one.tokens)]
                assert whole.text.startswith(one.text)
            assert len(got[0].tokens) >= 5
            assert got[3].tokens == []
            await engine.resume()

    bench().run(go)


@pytest.mark.parametrize("stop", ["pause", "abort"])
def test_a_request_that_has_just_come_is_ended_wherever_the_engine_is_with_it(bench, ask, stop):
    """Whatever number of turns of the event loop lies between the request and what ends it."""

    async def go(b):
        async with b.engine() as engine:
            for turns in range(12):
                waiting = asyncio.create_task(engine.generate(ask("a", new=200)))
                for _ in range(1 + turns):
                    await asyncio.sleep(0)
                await (engine.pause("abort") if stop == "pause" else engine.abort(["a"]))
                assert (await asyncio.wait_for(waiting, 30)).finish == "abort", f"{turns} turns"
                await engine.resume()

    bench().run(go)


def test_an_abort_ends_the_named_requests_only(bench, ask):
    async def go(b):
        async with b.engine(slots=2) as engine:
            asked = [ask(str(i), new=100) for i in range(5)]
            want = await asyncio.gather(*(engine.generate(r) for r in asked))
            tasks = await running(engine, asked)
            ended = await engine.abort(["0", "4", "nobody"])
            assert sorted(one.id for one in ended) == ["0", "4"]
            got = await asyncio.gather(*tasks)
            assert [one.finish for one in got] == ["abort", "length", "length", "length", "abort"]
            assert [one.tokens for one in got[1:4]] == [one.tokens for one in want[1:4]]
            assert got[0] == next(one for one in ended if one.id == "0")
            kept = got[0].tokens
            rest = ask("0", [5, 6, 7, *kept], new=100 - len(kept), kept=len(kept))
            rest = await engine.generate(replace(rest, seed=asked[0].seed))
            assert kept + rest.tokens == want[0].tokens
            assert got[0].log_probs + rest.log_probs == want[0].log_probs
            assert await engine.abort(["0"]) == []

    bench().run(go)


def test_a_cancelled_caller_frees_its_slot(bench, ask):
    async def go(b):
        async with b.engine(slots=1) as engine:
            tasks = await running(engine, [ask("gone", new=250), ask("waiting", new=250)])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert len((await engine.generate(ask("next"))).tokens) == 12
            assert not engine._scheduler.busy

    bench().run(go)


def test_released_memory_is_computed_again(bench, ask):
    """A colocated turn in the middle of two requests: nothing is lost, and with the same weights no bit differs."""

    async def go(b):
        async with b.engine(slots=2) as engine:
            asked = [ask(str(i), new=100) for i in range(3)]
            want = await asyncio.gather(*(engine.generate(r) for r in asked))
            tasks = await running(engine, asked)
            await engine.pause("keep")
            await engine.release({"kv", "weights"})
            assert engine._scheduler.served.cache.keys == []
            assert all(tensor.is_meta for tensor in engine._scheduler.served._twin.model.state_dict().values())
            held = asyncio.create_task(engine.generate(ask("held")))
            await settle()
            with pytest.raises(EngineError, match="ENG06"):
                await engine.resume()
            with pytest.raises(EngineError, match="ENG06"):
                await engine.score([5, 6], 1)
            with pytest.raises(EngineError, match="ENG06"):
                await engine.load(b.update())
            await engine.reacquire({"weights"})
            await engine.load(b.update())
            await engine.reacquire({"kv"})
            await engine.resume()
            got = await asyncio.gather(*tasks)
            assert [(one.tokens, one.log_probs) for one in got] == [(one.tokens, one.log_probs) for one in want]
            assert len((await held).tokens) == 12

    bench().run(go)


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(bench, ask):
    async def go(b):
        async with b.engine(slots=1) as engine:
            want = await engine.generate(ask("short", new=3))
            decode = engine._scheduler.served.decode
            calls = []

            def failing(slots, count):
                calls.append(count)
                if len(calls) == 6:
                    raise RuntimeError("no more")
                return decode(slots, count)

            engine._scheduler.served.decode = failing
            asked = [ask("short", new=3), ask("long", new=50), ask("waiting")]
            short, long, waiting = await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)
            assert short.tokens == want.tokens, "what had ended is delivered"
            for error in (long, waiting):
                assert isinstance(error, EngineError)
                assert error.code == "ENG84"
                assert "no more" in error.what
            assert (await engine.generate(ask("short", new=3))).log_probs == want.log_probs

    bench().run(go)


def test_asyncio_stays_awake_while_the_engine_decodes(bench, ask):
    async def go(b):
        async with b.engine(slots=4) as engine:
            tasks = await running(engine, [ask(str(i), new=150) for i in range(8)])
            turns = 0
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
                turns += 1
            assert turns > 100

    bench().run(go)


def test_no_torch_work_is_done_on_the_event_loops_thread(bench, ask):
    async def go(b):
        seen = set()
        async with b.engine() as engine:
            for owner, names in (
                (
                    engine._scheduler.served,
                    ("decode", "prefill", "load", "release", "allocate", "fingerprints"),
                ),
                (engine._scheduler, ("run", "score", "end", "retract")),
            ):
                for name in names:
                    inner = getattr(owner, name)

                    def wrapped(*args, inner=inner, **options):
                        seen.add(threading.current_thread().name)
                        return inner(*args, **options)

                    setattr(owner, name, wrapped)
            await asyncio.gather(*(engine.generate(ask(str(i))) for i in range(6)))
            await engine.score([5, 6, 7], 1)
            await engine.load(b.update(1))
            await engine.fingerprints()
            await engine.pause("retract")
            await engine.release({"kv"})
            await engine.reacquire({"kv"})
            await engine.abort(["x"])
            await engine.resume()
        assert len(seen) == 1
        assert next(iter(seen)).startswith("torch")

    bench().run(go)


def test_close_ends_waiting_requests_and_leaves_nothing(bench, ask):
    async def go(b):
        async with b.engine(slots=1) as engine:
            tasks = await running(engine, [ask("a", new=250), ask("b", new=250)])
            served, model = weakref.ref(engine._scheduler.served), weakref.ref(engine._scheduler.served._twin.model)
            await engine.close()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [error.code for error in done] == ["ENG84", "ENG84"]
            with pytest.raises(EngineError, match="ENG84"):
                await engine.generate(ask())
            await engine.close()
        gc.collect()
        assert served() is None
        assert model() is None
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    bench().run(go)


def test_a_request_that_ends_while_the_engine_is_closed_is_answered(bench, ask, monkeypatch):
    from slime_core.engines.local import engine as engine_module

    monkeypatch.setattr(engine_module, "HOP_SECONDS", 60.0)  # all of its tokens in one hop, however slow

    async def go(b):
        async with b.engine() as engine:
            hop, begun, rest = engine._hop, threading.Event(), threading.Event()

            def held(*args):
                begun.set()
                rest.wait()
                return hop(*args)

            engine._hop = held
            task = asyncio.create_task(engine.generate(ask(new=3)))
            await asyncio.to_thread(begun.wait)
            closing = asyncio.create_task(engine.close())
            await settle()
            rest.set()
            await closing
            assert len((await asyncio.wait_for(task, 30)).tokens) == 3

    bench().run(go)


def test_an_engine_serves_one_event_loop_after_another(bench, ask):
    """Evaluation runs in an asyncio.run of its own."""
    b = bench()
    engines = []

    async def first():
        from slime_core.engines.local import LocalEngine

        options = {"slots": 2, "context_len": 64, "dtype": "float32", "device": "cpu", "thread": b.thread}
        engines.append(LocalEngine(b.folder, **options))
        await engines[0].load(b.update())
        return await engines[0].generate(ask())

    async def second():
        done = await engines[0].generate(ask())
        await engines[0].close()
        return done

    assert asyncio.run(first()).tokens == asyncio.run(second()).tokens


@pytest.mark.parametrize(("slots", "context_len"), [(0, 64), (4, 1)])
def test_impossible_sizes_are_refused(bench, slots, context_len):
    from slime_core.engines.local import LocalEngine

    b = bench()
    with pytest.raises(ValueError, match=str(min(slots, context_len))):
        LocalEngine(b.folder, slots=slots, context_len=context_len, dtype="float32", device="cpu", thread=b.thread)
