"""Sessions that end, runs that stop, agents that hang up, and draws that come out the same again."""

import asyncio
import socket
from dataclasses import replace

import pytest
from agent_session import Client, LineEngine

from slime_chat import converse, open_session
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.errors import DataError, EngineError
from slime_core.plugins.boundary import DEADLINE, Deadline
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import SamplingParams, Status

pytestmark = pytest.mark.unit

HI = {"role": "user", "content": "hi"}


async def until(condition):
    """Let the loop run until it holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_an_engine_that_fails_reaches_the_sample_in_place_of_the_agents_error(context, talk):
    broken = EngineError("it burns", code="ENG84")

    async def agent(client, session):
        answer = await client.post([HI])
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "ENG84")
        assert (await client.post([HI])).json()["error"]["code"] == "session_over"
        raise RuntimeError("the agent gave up")

    with pytest.raises(EngineError, match="it burns") as caught:
        talk(context(broken), agent)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_engine_that_fails_is_told_though_the_agent_hides_it(context, talk):
    async def agent(client, session):
        await client.post([HI])

    with pytest.raises(EngineError, match="it burns"):
        talk(context(EngineError("it burns", code="ENG84")), agent)


def test_a_session_that_the_run_stops_is_aborted_and_not_scored(context, talk, letters):
    async def agent(client, session):
        first = await client.say([HI])
        said = [HI, first, {"role": "user", "content": "go"}]
        for _ in range(2):
            answer = await client.post(said)
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_aborted")

    ctx = context("one|", "<abort>")
    (sample,) = talk(ctx, agent).samples()
    assert len(ctx.engine.requests) == 2
    assert (sample.status, letters.decode(sample.response_tokens, False)) == (Status.ABORTED, "one|")


def test_in_a_group_an_agent_that_breaks_over_a_stopped_session_is_no_error(context, issue):
    async def agent(session):
        async with Client(session) as client:
            (await client.post([HI])).raise_for_status()

    group = asyncio.run(converse(issue(2), context("one|", "<abort>"), agent))
    assert {sample.status for sample in group.samples} == {Status.COMPLETED, Status.ABORTED}  # whoever asked first


def test_an_agents_own_error_is_the_functions(context, issue):
    async def broken(session):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(converse(issue(), context("one|"), broken))


def test_an_error_that_a_task_tolerates_fails_its_sample_alone(context, issue):
    async def agent(session):
        async with Client(session) as client:
            await client.say([HI])
        if session.sample.id == "main/5-1":
            raise TimeoutError("it hangs")

    group = asyncio.run(converse(issue(3), context("one|"), agent, tolerate=(OSError,)))
    assert [sample.status for sample in group.samples] == ["completed", "failed", "completed"]
    assert [sample.metadata["chat"].get("failed") for sample in group.samples] == [
        None,
        "TimeoutError: it hangs",
        None,
    ]


def test_a_key_ends_with_its_session_and_the_server_with_the_last(context, issue):
    async def run():
        ctx, (one, two) = context("x|"), issue(2).samples
        async with open_session(one, ctx) as first:
            async with open_session(two, ctx) as second, Client(second) as client:
                assert second.base_url == first.base_url
                assert second.api_key != first.api_key
                await client.say([HI])
            async with Client(second) as client:
                late = await client.post([HI])
                assert (late.status_code, late.json()["error"]["code"]) == (410, "session_over")
            async with Client(first) as client:
                await client.say([HI])
            port = int(first.base_url.split(":")[2].split("/")[0])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert [one.response, two.response] == ["", ""]
        assert [s.response for s in (*first.samples(), *second.samples())] == ["x", "x"]

    asyncio.run(run())


def test_a_request_under_way_when_its_session_ends_is_refused_and_its_generation_ends(context, issue):
    async def run():
        ctx = context("x|")
        ctx.engine.gates[0] = asyncio.Event()
        (sample, other) = issue(2).samples
        async with open_session(other, ctx):
            async with open_session(sample, ctx) as session:
                client = Client(session)
                pending = asyncio.create_task(client.post([HI]))
                await until(lambda: ctx.engine.requests)
            answer = await pending
            await client.http.aclose()
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_over")
        assert session.samples()[0].metadata["chat"]["cancelled"] == 1

    asyncio.run(run())


def test_an_agent_that_hangs_up_ends_its_request(context, issue):
    async def run():
        ctx = context("x|")
        ctx.engine.gates[0] = asyncio.Event()
        async with open_session(issue().samples[0], ctx) as session:
            async with Client(session) as client:
                asked = asyncio.create_task(client.post([HI]))
                await until(lambda: ctx.engine.requests)
                asked.cancel()
            await until(lambda: session.counts["cancelled"])
            async with Client(session) as client:
                await client.say([HI])
        facts = session.samples()[0].metadata["chat"]
        assert (facts["calls"], facts["cancelled"]) == (1, 1)

    asyncio.run(run())


def uniform(letters, seed=1, **changes):
    """A context around an engine whose draws are a function of seed and position alone."""
    engine = FakeEngine(vocab_size=len(letters), stop_token=0)
    engine.version = 1
    config = Config.model_validate({"seed": seed})
    return Context(
        config=config, engine=engine, tokenizer=letters, sampling=SamplingParams(max_new_tokens=24), **changes
    )


async def wander(session):
    """Two turns, a retry, and four sub-agents at once, of which two ask the same."""
    async with Client(session) as client:
        first = await client.say([HI])
        await asyncio.gather(*(client.say([HI, first, {"role": "user", "content": text}]) for text in "aabc"))
        await client.say([{"role": "user", "content": "anew"}])


def tokens_of(group):
    return sorted(tuple(sample.tokens) for sample in group.samples)


def test_draws_are_a_function_of_run_sample_attempt_and_tokens(letters, issue):
    def run(seed=1, attempt=0, **changes):
        group = issue(2)
        for sample in group.samples:
            sample.attempt = attempt
        return tokens_of(asyncio.run(converse(group, uniform(letters, seed, **changes), wander)))

    same = run()
    assert run() == same
    assert len(set(same)) == len(same) == 10
    for other in (run(seed=2), run(attempt=1), run(evaluation=True, version=1)):
        assert not set(other) & set(same)


def test_a_clients_seed_chooses_another_draw_and_the_same_one_again_in_another_session(letters, talk):
    def run(*seeds):
        async def agent(client, session):
            for seed in seeds:
                await client.say([HI], **({} if seed is None else {"seed": seed}))

        return [sample.tokens for sample in talk(uniform(letters), agent).samples()]

    (plain,), (seven,) = run(None), run(7)
    assert plain != seven
    assert run(7, None) == [seven, plain]
    assert run(7, 7)[0] == seven != run(7, 7)[1]


def test_requests_side_by_side_have_names_of_their_own_and_the_sample_its_own_first(context, talk):
    ctx = context("x|")

    async def agent(client, session):
        gate = ctx.engine.gates[0] = ctx.engine.gates[1] = ctx.engine.gates[2] = asyncio.Event()
        waiting = [asyncio.create_task(client.say([HI])) for _ in range(3)]
        await until(lambda: len(ctx.engine.requests) == 3)
        gate.set()
        await asyncio.gather(*waiting)
        await client.say([HI])

    talk(ctx, agent)
    names = [request.id for request in ctx.engine.requests]
    assert names == ["main/5-0", "main/5-0~1", "main/5-0~2", "main/5-0"]


def test_a_tokenizer_without_a_template_is_told_at_once(issue):
    ctx = Context(
        config=Config(), tokenizer=CharTokenizer(), engine=FakeEngine(), sampling=SamplingParams(max_new_tokens=4)
    )
    with pytest.raises(DataError, match="chat template") as caught:
        asyncio.run(converse(issue(), ctx, wander))
    assert caught.value.code == "TOK41"


def test_siblings_join_the_groups_rollouts(context, issue):
    async def agent(session):
        async with Client(session) as client:
            for _ in range(2 if session.sample.id == "main/5-0" else 1):
                await client.say([HI])

    group = asyncio.run(converse(issue(2), context("x|"), agent))
    assert group.rollouts == {0: [0, 2], 1: [1]}
    assert [(sample.id, sample.rollout_id) for sample in group.samples] == [
        ("main/5-0", 0),
        ("main/5-1", 1),
        ("main/5-0.1", 0),
    ]


def test_the_environment_of_an_agent_leads_past_any_proxy(context, talk, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")

    async def agent(client, session):
        env = session.env
        assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == session.base_url
        assert env["OPENAI_API_KEY"] == session.api_key
        assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1"

    talk(context("x|"), agent)


def test_the_clocks_of_hook_and_agent_stand_while_the_run_holds_a_request(context, issue):
    class Holding(LineEngine):
        async def generate(self, request):
            clock = DEADLINE.get()
            with clock.stopped():
                self.clocks = [clock.runs, self.outer.runs]
            self.clocks += [clock is self.outer, clock.runs, self.outer.runs]
            return await super().generate(request)

    async def agent(session):
        async with Client(session) as client:
            await client.say([HI])

    async def hook(agent_timeout):
        ctx = context("x|")
        engine = Holding(ctx.tokenizer, ["x|"])
        async with Deadline(30) as engine.outer:
            await converse(issue(), replace(ctx, engine=engine), agent, agent_timeout=agent_timeout)
        return engine.clocks

    assert asyncio.run(hook(20)) == [False, False, False, True, True]
    assert asyncio.run(hook(None))[1:] == [False, False, False, True]


def test_an_agent_that_hangs_fails_its_own_sample(context, issue):
    async def agent(session):
        async with Client(session) as client:
            await client.say([HI])
        if session.sample.id == "main/5-1":
            await asyncio.Event().wait()

    group = asyncio.run(converse(issue(3), context("one|"), agent, agent_timeout=3))
    assert [sample.status for sample in group.samples] == ["completed", "failed", "completed"]
    assert "agent_timeout = 3 s" in group.samples[1].metadata["chat"]["failed"]


def test_an_agent_that_rages_harms_no_other(context, issue, monkeypatch):
    """Ten megabytes, nonsense, and more connections than are kept, some with half a request, while another works."""
    monkeypatch.setattr("slime_compat.loopback.MOST_OPEN", 20)

    async def rage(session):
        host, port = session.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        async with Client(session) as client:
            large = await client.post([{"role": "user", "content": "x" * 10_000_000}])
            assert (large.status_code, large.json()["error"]["message"]) == (413, "a body may have 8388608 bytes")
        pairs = [await asyncio.open_connection(host, port) for _ in range(200)]
        for _, writer in pairs[-20:-10]:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bea")
        for _, writer in pairs[-10:]:
            writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        answers = [await asyncio.wait_for(reader.read(), 20) for reader, _ in pairs[:150]]
        assert set(answers) == {b""}, "the first of too many silent ones are closed"
        assert (await asyncio.wait_for(pairs[-1][0].read(), 20)).startswith(b"HTTP/1.1 400")
        for _, writer in pairs:
            writer.close()
        raise ConnectionError("enough")

    async def work(session):
        async with Client(session) as client:
            said = [HI]
            for _ in range(20):
                said += [await client.say(said), HI]

    async def agent(session):
        await (rage if session.sample.id == "main/5-0" else work)(session)

    ctx = context("one|")
    group = asyncio.run(converse(issue(2), ctx, agent, tolerate=(ConnectionError,)))
    assert [sample.status for sample in group.samples] == ["failed", "completed"]
    assert sum(group.samples[1].loss_mask) == 20 * len("one|")
