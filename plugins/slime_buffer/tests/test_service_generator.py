"""A generator's loop: claims, heartbeats, writes; what fails is given back, and in the end told as failed, never as 0."""

import asyncio
import json

import httpx
import pytest

from slime_buffer import generator
from slime_buffer.client import BufferClient
from slime_buffer.generator import Away, EngineAway, GiveUp, Story, Task, Turn
from slime_buffer.service import models

pytestmark = pytest.mark.unit


@pytest.fixture
def working(monkeypatch):
    """`serve` whose client reaches a World instead of the network."""

    async def run(world, generate, **options):
        def client(url, token, **rest):
            return BufferClient(url, token, transport=httpx.ASGITransport(world.app), **{**rest, "deadline": 5.0})

        monkeypatch.setattr(generator, "BufferClient", client)
        monkeypatch.setattr(generator, "WAIT", 0.05)
        monkeypatch.setattr(generator, "PAUSE", 0.0)
        return await generator.serve("http://buffer.example", world.token, generate, **options)

    return run


def made(task, reward=1.0):
    story = Story(task)
    story.say(Turn(tokens=[7, 8], log_probs=[-0.1, -0.2], versions=[3, 3], text="x", finish="stop"))
    return story.sequence(reward=reward)


def test_groups_are_made_and_written_sample_by_sample(serving, working):
    async def body():
        async with serving() as world:
            await world.ask("a", "b", "c")
            seen = []

            async def generate(task):
                seen.append((task.id, task.seed, task.label))
                return made(task)

            counts = await working(world, generate, groups=3, concurrency=2)
            assert counts == {"groups": 3, "stored": 6}
            assert sorted(seen) == [(f"{n}-{j}", j, "2") for n in "abc" for j in range(2)]
            ended = (await world.client.claim_batch("t", "run", count=9)).groups
            assert sorted(g.id for g in ended) == ["a", "b", "c"]
            assert ended[0].rollouts[0].sequences[0].loss_mask == [1, 1]

    asyncio.run(body())


def test_a_generator_that_raises_is_called_again_and_then_its_sample_has_failed(serving, working):
    """The exception is the sample's, and never a reward of 0."""

    async def body():
        async with serving() as world:
            await world.ask("a")
            tries, notes = [], []

            async def generate(task):
                if task.id == "a-0":
                    tries.append(1)
                    raise RuntimeError("the tool crashed")
                return made(task)

            counts = await working(world, generate, groups=1, concurrency=1, tries=3, note=notes.append)
            assert len(tries) == 3
            assert counts["failed"] == 1
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert [r.failed for r in ended.rollouts] == ["RuntimeError: the tool crashed", ""]
            assert sum("the tool crashed" in note for note in notes) == 3
            assert (await world.client.stats()).samples["dropped/failed"] == 1

    asyncio.run(body())


@pytest.mark.parametrize("answer", ["a text", 3, [], None], ids=str)
def test_a_function_that_answers_something_else_is_a_failed_rollout(serving, working, answer):
    async def body():
        async with serving() as world:
            await world.ask("a", samples=1)

            async def generate(task):
                return answer

            await working(world, generate, groups=1, concurrency=1, tries=1)
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert ended.rollouts[0].failed

    asyncio.run(body())


def test_giving_up_is_not_tried_again(serving, working):
    async def body():
        async with serving() as world:
            await world.ask("a", samples=1)

            async def generate(task):
                raise GiveUp("nothing to say")

            counts = await working(world, generate, groups=1, concurrency=1)
            assert counts["failed"] == 1
            assert (await world.client.stats()).since_start["work_claimed"] == 1

    asyncio.run(body())


@pytest.mark.parametrize(("away", "counted"), [(EngineAway, "engine_away"), (Away, "away")])
def test_an_address_that_is_away_costs_no_try(serving, working, away, counted):
    """A run that was killed: its address is dead until it is resumed, and the work is not lost. So with an environment."""

    async def body():
        async with serving() as world:
            await world.ask("a", samples=1)
            asked = []

            async def generate(task):
                asked.append(1)
                if len(asked) < 8:
                    raise away("connection refused")
                return made(task)

            counts = await working(world, generate, groups=1, concurrency=1, tries=2)
            assert counts[counted] == 7
            assert counts["failed"] == 0
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert ended.rollouts[0].failed == ""

    asyncio.run(body())


def test_a_stop_gives_open_work_back(serving, working):
    async def body():
        async with serving() as world:
            await world.ask("a")
            stop = asyncio.Event()

            async def generate(task):
                if task.id == "a-0":
                    return made(task)
                while not sum(row.written for row in await world.client.peek()):  # the other one first
                    await asyncio.sleep(0.001)
                stop.set()
                await asyncio.Event().wait()

            await working(world, generate, concurrency=1, lease_seconds=3600, stop=stop)
            (work,) = await world.client.claim_work("other")
            assert [s.id for s in work.samples] == ["a-1"], "what was made stays"

    asyncio.run(body())


def test_a_lease_that_is_lost_ends_the_work(serving, working):
    async def body():
        async with serving() as world:
            await world.ask("a", "b", samples=1)
            cancelled = []

            async def generate(task):
                if task.work.id == "a" and not cancelled:
                    await world.client.drop("run", [models.Key(group="a")], "not wanted")
                    try:
                        await asyncio.Event().wait()
                    finally:
                        cancelled.append(task.id)
                return made(task)

            counts = await working(world, generate, groups=1, concurrency=1, lease_seconds=0.3)
            assert cancelled == ["a-0"]
            assert counts["groups"] == 1
            assert (await world.states())["b", 0] == "finished"

    asyncio.run(body())


def test_a_story_keeps_ids_masks_and_versions_turn_by_turn():
    work = models.Work(
        id="a",
        lease="w1",
        run="run",
        tokens=[1, 2],
        samples=[],
        sampling=models.Sampling(max_new_tokens=4, temperature=0.0),
        version=0,
    )
    task = Task(work, "a-0", 5, None)
    story = Story(task)
    with pytest.raises(GiveUp):
        story.sequence()
    story.say(Turn(tokens=[3], log_probs=[-0.5], versions=[7], text="x", finish="length"))
    story.tell([1, 2])
    story.say(Turn(tokens=[4, 5], log_probs=[-0.25, -1.0], versions=[7, 8], text="y", finish="stop"))
    made = story.sequence({"right": 1.0, "neat": 0.0}, note="n")
    assert (made.tokens, made.response_length) == ([1, 2, 3, 1, 2, 4, 5], 5)
    assert made.loss_mask == [1, 0, 0, 1, 1]
    assert made.log_probs == [-0.5, 0.0, 0.0, -0.25, -1.0]
    assert made.weight_versions == [7, -1, -1, 7, 8]
    assert (made.response, made.status, made.reward) == ("xy", "completed", {"right": 1.0, "neat": 0.0})
    assert (made.temperature, made.metadata) == (1.0, {"note": "n"})


def test_the_engine_is_asked_with_the_samples_seed_and_the_runs_parameters():
    asked = []

    def engine(request):
        asked.append((str(request.url), request.headers["authorization"], json.loads(request.content)))
        status = 401 if len(asked) == 2 else 422 if len(asked) == 3 else 200
        meta = {
            "output_token_logprobs": [[-0.5, 4, None]],
            "weight_version": "3",
            "weight_versions": [2],
            "finish_reason": {"type": "stop"},
        }
        return httpx.Response(status, json={"text": "t", "output_ids": [4], "meta_info": meta})

    async def body():
        work = models.Work(
            id="a",
            lease="w1",
            run="run",
            samples=[],
            sampling=models.Sampling(max_new_tokens=4, top_k=3),
            version=0,
            engine=models.EngineEndpoint(url="http://127.0.0.1:1", token="secret"),
        )
        async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
            task = Task(work, "a-0", 2**63 + 5, http)
            turn = await task.ask([1, 2], max_new_tokens=2)
            with pytest.raises(EngineAway):
                await task.ask([1])
            with pytest.raises(ValueError, match="422"):
                await task.ask([1])
        assert turn == Turn(tokens=[4], log_probs=[-0.5], versions=[2], text="t", finish="stop")
        url, bearer, sent = asked[0]
        assert (url, bearer) == ("http://127.0.0.1:1/generate", "Bearer secret")
        assert sent["input_ids"] == [1, 2]
        assert sent["return_logprob"] is True
        params = sent["sampling_params"]
        assert (params["max_new_tokens"], params["top_k"], params["sampling_seed"]) == (2, 3, 2**63 + 5)

    asyncio.run(body())
