"""An engine of several servers: loads, versions, memory, checksums, and servers that come back."""

import asyncio

import pytest
from engine_case import EPOCH, EXPECTED, PATIENCE, begun, request, run, serving, update

from slime_core.errors import EngineError
from slime_sglang.external import OLD
from slime_sglang.health import Watch
from slime_sglang.server_health import WatchLimits

pytestmark = pytest.mark.unit


QUICK = WatchLimits(interval=0.01, timeout=30.0, start_timeout=PATIENCE, max_restarts=2)


def test_no_request_is_sent_before_the_first_load(tmp_path):
    async def work():
        async with serving(tmp_path) as (engine, fakes):
            for call in (engine.generate(request("a-0")), engine.score([1, 2, 3], 1)):
                with pytest.raises(EngineError, match="ENG83"):
                    await call
            assert not [body for fake in fakes for body in fake.bodies]
            assert engine.version == -1

    run(work())


def test_all_servers_take_an_update_and_stamp_epoch_and_version(tmp_path):
    async def work():
        async with serving(tmp_path, 3) as (engine, fakes):
            await engine.load(update(tmp_path, 4))
            assert engine.version == 4
            assert {fake.version for fake in fakes} == {f"{EPOCH}.4"}
            done = await asyncio.gather(*(engine.generate(request(f"p{n}-0")) for n in range(9)))
            assert all(one.versions == [4] * 6 and one.tokens == EXPECTED and one.epoch == EPOCH for one in done)
            assert all(fake.bodies for fake in fakes), "requests did not spread"
            assert (await engine.score([1, 2, 3, 4], 2)).shape == (2,)

    run(work())


def test_a_server_that_refuses_an_update_serves_nothing_until_it_has_it(tmp_path):
    """Fenced and restarted; no mixed versions are served."""

    async def work():
        async with (
            serving(tmp_path, 2) as (engine, fakes),
            Watch(engine.servers, engine.fleet, QUICK) as engine.fleet.watch,
        ):
            await engine.load(update(tmp_path, 1))
            fakes[1].refuse = 1
            await engine.load(update(tmp_path, 2))
            assert engine.version == 2
            assert fakes[1].version == f"{EPOCH}.1"
            assert [lane.number for lane in engine.router.lanes] == [0]
            first = [await engine.generate(request(f"a{n}-0")) for n in range(4)]
            await engine.fleet.watch.settled()
            assert fakes[1].version == f"{EPOCH}.2"
            assert [lane.version for lane in engine.router.lanes] == [2, 2]
            later = await asyncio.gather(*(engine.generate(request(f"b{n}-0")) for n in range(8)))
            assert fakes[1].bodies, "the server that came back is not chosen"
            assert {version for one in [*first, *later] for version in one.versions} == {2}

    run(work())


def test_an_update_that_every_server_refuses_is_taken_by_those_that_come_back(tmp_path):
    async def work():
        async with (
            serving(tmp_path, 1) as (engine, fakes),
            Watch(engine.servers, engine.fleet, QUICK) as engine.fleet.watch,
        ):
            fakes[0].refuse = 1
            await engine.load(update(tmp_path, 1))
            assert engine.version == 1
            fakes[0].refuse = 100
            with pytest.raises(EngineError, match="ENG89"):
                await engine.load(update(tmp_path, 2))
            with pytest.raises(EngineError):
                await engine.generate(request("a-0"))

    run(work())


def test_tokens_from_before_a_load_keep_their_version_where_the_server_tells_no_spans(tmp_path):
    """SGLang 0.5.12: what runs is ended with its tokens, and continued under the new weights."""

    async def work():
        async with serving(tmp_path, 2, features=OLD) as (engine, fakes):
            assert "live_load" not in engine.abilities
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, fakes, ["a-0", "b-0"])
            loading = asyncio.create_task(engine.load(update(tmp_path, 2)))
            await loading
            for fake in fakes:
                fake.go.set()
            for task in tasks.values():
                done = await task
                assert done.versions == [1, 1, 2, 2, 2, 2]
                assert done.tokens == EXPECTED
                assert done.finish == "length"
            continued = [body for fake in fakes for body in fake.bodies if len(body["input_ids"]) == 5]
            assert len(continued) == 2
            assert all(body["sampling_params"]["max_new_tokens"] == 4 for body in continued)

    run(work())


def test_requests_stay_on_a_server_that_tells_spans_and_are_retracted_for_the_load(tmp_path):
    async def work():
        async with serving(tmp_path, 1) as (engine, (fake,)):
            assert "live_load" in engine.abilities
            await engine.load(update(tmp_path, 1))
            assert not fake.paused, "an idle server was paused"
            tasks = await begun(engine, [fake], ["a-0"])
            await engine.load(update(tmp_path, 2))
            assert fake.paused == ["retract"]
            assert fake.paths().index("/update_weights_from_disk") < fake.paths().index("/continue_generation")
            assert not fake.aborts
            fake.go.set()
            assert (await tasks["a-0"]).versions == [2] * 6
            updates = [body for path, body in fake.calls if path == "/update_weights_from_disk"]
            assert [body["flush_cache"] for body in updates] == [True, True]

    run(work())


def test_the_cache_of_requests_that_are_kept_in_place_is_not_dropped(tmp_path):
    async def work():
        async with serving(tmp_path, 1, pause_mode="in_place") as (engine, (fake,)):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, [fake], ["a-0"])
            await engine.load(update(tmp_path, 2))
            assert fake.paused == ["in_place"]
            assert fake.calls[-2][1]["flush_cache"] is False
            fake.go.set()
            await tasks["a-0"]

    run(work())


def test_memory_is_given_and_taken_by_tags_in_order_and_never_under_requests(tmp_path):
    async def work():
        async with serving(tmp_path, 1, memory_saver=True) as (engine, (fake,)):
            assert "release" in engine.abilities
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, [fake], ["a-0"])
            await engine.pause("keep")
            await engine.release({"kv", "weights"})
            with pytest.raises(EngineError, match="ENG06"):
                await engine.resume()
            with pytest.raises(EngineError, match="ENG06"):
                await engine.load(update(tmp_path, 2))
            await engine.reacquire({"weights"})
            await engine.load(update(tmp_path, 2))
            await engine.reacquire({"kv"})
            fake.go.set()
            await engine.resume()
            done = await tasks["a-0"]
            assert done.tokens == EXPECTED
            assert done.versions == [1, 1, 2, 2, 2, 2]
            memory = [(path, body["tags"]) for path, body in fake.calls if path.endswith("_occupation")]
            assert memory == [
                ("/release_memory_occupation", ["kv_cache", "cuda_graph", "weights"]),
                ("/resume_memory_occupation", ["weights"]),
                ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
            ]
            flushes = [body["flush_cache"] for path, body in fake.calls if path == "/update_weights_from_disk"]
            assert flushes == [True, False]

    run(work())


def test_servers_without_the_memory_saver_refuse_to_give_memory(tmp_path):
    async def work():
        async with serving(tmp_path, 1) as (engine, _):
            assert "release" not in engine.abilities
            with pytest.raises(EngineError, match="memory saver"):
                await engine.release({"kv"})

    run(work())


def test_checksums_of_servers_that_differ_name_the_server(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            assert await engine.fingerprints() == {"model.norm.weight": "00ff00ff00ff00ff"}
            fakes[1].checksums = {"model.norm.weight": "1111111111111111"}
            found = (await engine.fingerprints())["model.norm.weight"]
            assert "server 0" in found
            assert "1111111111111111 on server 1" in found

    run(work())


def test_a_restarted_server_asks_the_trainer_and_waits_for_no_load_and_no_load_for_it(tmp_path):
    """Weights in memory go once: a server that comes back while the trainer trains gets what it publishes later."""

    async def work():
        async with (
            serving(tmp_path, 2, device="cuda") as (engine, fakes),
            Watch(engine.servers, engine.fleet, QUICK) as engine.fleet.watch,
        ):
            asked, idle = asyncio.Event(), asyncio.Event()

            async def source(route):
                asked.set()
                await idle.wait()
                assert route.transport == "tensor"
                return update(tmp_path, engine.version, "tensor")

            engine.fleet.source = source
            await engine.load(update(tmp_path, 1, "tensor"))
            engine.fleet.watch.report(1, EngineError("it hangs", code="ENG85"))
            await asked.wait()
            await engine.load(update(tmp_path, 2, "tensor"))
            assert [lane.number for lane in engine.router.lanes] == [0]
            idle.set()
            await engine.fleet.watch.settled()
            assert [lane.version for lane in engine.router.lanes] == [2, 2]
            assert fakes[1].version == f"{EPOCH}.2"

    run(work())


def test_the_next_load_fills_the_only_server_that_was_restarted(tmp_path):
    """The trainer publishes to servers: where none is open, it waits for one, and that one waits for it alone."""

    async def work():
        async with (
            serving(tmp_path, 1, device="cuda") as (engine, (fake,)),
            Watch(engine.servers, engine.fleet, QUICK) as engine.fleet.watch,
        ):
            asked = asyncio.Event()

            async def source(_):
                asked.set()
                await asyncio.Event().wait()  # the trainer is busy until the load is through

            engine.fleet.source = source
            await engine.load(update(tmp_path, 1, "tensor"))
            engine.fleet.watch.report(0, EngineError("it hangs", code="ENG85"))
            await asked.wait()
            waiting = asyncio.create_task(engine.generate(request("a-0")))
            route = await engine.route("none")
            assert route.transport == "tensor"
            assert not fake.bodies, "a server without weights was asked"
            await engine.load(update(tmp_path, 2, "tensor"))
            assert (await waiting).versions == [2] * 6

    run(work())
