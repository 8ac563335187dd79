"""A run's side of the buffer: what it asks for, what it makes of what comes, and when it says that it has it."""

import asyncio
import json

import httpx
import pytest

from slime_buffer.client import BufferClient
from slime_buffer.exchange import Exchange, run_name
from slime_buffer.rollout import BufferRollout, asked_group, filled, token_of
from slime_buffer.service import models
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.errors import ConfigError, DataError
from slime_core.plugins import load_plugins, option_models
from slime_core.plugins.router import INFRA
from slime_core.protocols import GroupRecord
from slime_core.rollout.groups import pending_group
from slime_core.types import Prompt, Reward, SamplingParams, Status

pytestmark = pytest.mark.unit


class Books:
    """A ledger's memory, as a run's hooks may ask it."""

    def __init__(self):
        self.known = {}

    async def groups(self, prompt_ids):
        return {name: self.known[name] for name in prompt_ids if name in self.known}

    def has(self, name, state="finished", attempt=0, reason=""):
        self.known[name] = GroupRecord(state=state, attempt=attempt, last_reason=reason)


@pytest.fixture
def exchange(monkeypatch):
    """`exchange(world, books)`: a run's Exchange that reaches a World instead of the network."""

    def make(world, books, run="run"):
        def client(url, token, **rest):
            return BufferClient(url, token, transport=httpx.ASGITransport(world.app), **rest)

        monkeypatch.setattr("slime_buffer.exchange.BufferClient", client)
        monkeypatch.setattr("slime_buffer.exchange.WAIT", 0.2)
        return Exchange("http://buffer.example", world.token, run, books.groups, patience=20)

    return make


@pytest.fixture
def config(tmp_path):
    return load_config(None, ["--hf-checkpoint", str(tmp_path), "--n-samples-per-prompt", "3"])


@pytest.fixture
def group(config):
    prompt = Prompt(id="grpo/5", position=5, prompt="1+1=", tokens=[1, 2], label="2", metadata={"row": 5})
    return pending_group(prompt, config)


@pytest.fixture
def ctx(config):
    sampling = SamplingParams(max_new_tokens=4, temperature=0.5, stop=("\n",))
    return Context(config=config, sampling=sampling, version=3)


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


def wanted(name, attempt=0, samples=2):
    return models.AskedGroup(
        id=name,
        attempt=attempt,
        samples=[models.Wanted(id=f"{name}-{j}") for j in range(samples)],
        sampling=models.Sampling(max_new_tokens=4),
    )


def test_groups_come_back_to_those_who_asked_and_are_acknowledged_when_the_ledger_has_them(serving, exchange):
    async def body():
        async with serving() as world:
            books, run = Books(), None
            run = exchange(world, books)
            making = {name: asyncio.create_task(run.make(wanted(name), None, 20)) for name in "abc"}

            async def asked():
                return len(await world.states()) == 3

            await until(asked)
            assert (await world.client.stats()).since_start["groups_asked"] == 3
            for name in "cab":
                await world.write(name)
                assert (await making[name]).id == name
            for name in "abc":
                books.has(name, state="pending")
            assert not await run._settle_now(), "the ledger has nothing of it yet"
            assert set((await world.states()).values()) == {"finished"}
            books.has("a")
            books.has("b", state="dropped", reason="infra_error")

            async def settled():
                return await world.states() == {("a", 0): "read", ("b", 0): "read", ("c", 0): "finished"}

            await until(settled)
            books.has("c", state="trained")
            await run.close()
            assert set((await world.states()).values()) == {"read"}, "the end acknowledges what the ledger has by then"

    asyncio.run(body())


def test_a_resumed_run_finds_what_was_made_meanwhile_and_acknowledges_what_it_had(serving, exchange):
    """A crash between the ledger's commit and the acknowledgement, and one before the commit."""

    async def body():
        async with serving() as world:
            books = Books()
            first = exchange(world, books)
            making = [asyncio.create_task(first.make(wanted(name), None, 20)) for name in "abc"]

            async def asked():
                return len(await world.states()) == 3

            await until(asked)
            await world.write("a")
            await world.write("b")
            await asyncio.gather(*making[:2])
            making[2].cancel()
            await asyncio.gather(*making, return_exceptions=True)
            for task in first._tasks.values():  # the process dies: nothing is acknowledged on its way out
                task.cancel()
            first._recall = None
            await first.close()
            await world.write("c")
            books.has("a")  # the ledger had it; the acknowledgement was lost
            second = exchange(world, books)
            ended = await asyncio.gather(*(second.make(wanted(name), None, 20) for name in "bc"))
            assert [(e.id, len(e.rollouts)) for e in ended] == [("b", 2), ("c", 2)]
            assert (await world.client.stats()).groups["open"] == 0

            async def settled():
                return (await world.states())["a", 0] == "read"

            await until(settled)
            await second.close()

    asyncio.run(body())


def test_a_group_that_does_not_come_in_time_is_dropped_at_the_buffer_with_its_reason(serving, exchange):
    async def body():
        async with serving() as world:
            run = exchange(world, Books())
            ended = await run.make(wanted("a"), None, 0.05)
            assert (ended.state, ended.reason, ended.rollouts) == ("dropped", "timeout", [])

            async def dropped():
                return await world.states() == {("a", 0): "dropped"}

            await until(dropped)
            assert (await world.write("a")).trajectories[0].state == "refused"
            assert (await world.client.stats()).samples["dropped/timeout"] == 2
            await run.close()

    asyncio.run(body())


def test_a_group_that_is_dropped_by_others_does_not_keep_the_run_waiting(serving, exchange):
    async def body():
        async with serving() as world:
            run = exchange(world, Books())
            making = asyncio.create_task(run.make(wanted("a"), None, 20))

            async def asked():
                return len(await world.states()) == 1

            await until(asked)
            await world.client.drop("run", [models.Key(group="a")], "not feasible")
            ended = await making
            assert (ended.state, ended.reason) == ("dropped", "not feasible")
            await run.close()

    asyncio.run(body())


def test_a_group_that_the_run_dropped_is_dropped_at_the_buffer(serving, exchange):
    """A group that over-sampling left out: whoever asked is gone, and the ledger says why."""

    async def body():
        async with serving() as world:
            books = Books()
            run = exchange(world, books)
            making = [asyncio.create_task(run.make(wanted(name), None, 20)) for name in "ab"]

            async def asked():
                return len(await world.states()) == 2

            await until(asked)
            for task in making:
                task.cancel()
            await asyncio.gather(*making, return_exceptions=True)
            books.has("a", state="dropped", reason="over_sampled")
            books.has("b", state="pending")

            async def dropped():
                return await world.states() == {("a", 0): "dropped", ("b", 0): "open"}

            await until(dropped)
            assert (await world.client.stats()).samples["dropped/over_sampled"] == 2
            await run.close()

    asyncio.run(body())


def test_an_error_of_the_service_reaches_everybody_who_waits(serving, exchange):
    async def body():
        async with serving() as world:
            run = exchange(world, Books())
            run._client._http.headers["authorization"] = "Bearer another-token-of-mine"
            answers = await asyncio.gather(*(run.make(wanted(n), None, 20) for n in "ab"), return_exceptions=True)
            assert [error.code for error in answers] == ["ENG73", "ENG73"]
            await run.close()

    asyncio.run(body())


def test_the_buffer_is_asked_with_ids_seeds_and_parameters(group, ctx):
    asked = asked_group(group, ctx)
    assert (asked.id, asked.attempt, asked.tokens, asked.label, asked.metadata) == (
        "grpo/5",
        0,
        [1, 2],
        "2",
        {"row": 5},
    )
    assert [sample.id for sample in asked.samples] == ["grpo/5-0", "grpo/5-1", "grpo/5-2"]
    assert len({sample.seed for sample in asked.samples}) == 3
    assert (asked.sampling.temperature, asked.sampling.stop, asked.version) == (0.5, ["\n"], 3)
    group.samples[0].attempt = group.samples[1].attempt = group.samples[2].attempt = 1
    again = asked_group(group, ctx)
    assert again.attempt == 1
    assert {s.seed for s in again.samples} & {s.seed for s in asked.samples} == set()


def ended(*rollouts, state="finished", reason=""):
    return models.Ended(id="grpo/5", state=state, reason=reason, rollouts=list(rollouts))


def made(mark, reward=None):
    return models.Sequence(
        tokens=[1, 2, mark, 9],
        response_length=2,
        log_probs=[-0.5, 0.0],
        weight_versions=[3, -1],
        loss_mask=[1, 0],
        response="r",
        status="truncated",
        reward=reward,
        temperature=0.5,
        metadata={"turns": 2},
        train_metadata={"token_rewards": [1.0, 0.0]},
    )


def test_rollouts_from_the_buffer_fill_the_groups_own_samples(group):
    rollouts = [
        models.Rollout(sample="grpo/5-2", sequences=[made(7, 1.0), made(8, 0.5)]),
        models.Rollout(sample="grpo/5-0", sequences=[made(6)]),
        models.Rollout(sample="grpo/5-1", failed="crashed"),
    ]
    done = filled(group, ended(*rollouts))
    ids = [s.rollout_id for s in group.samples]
    assert done.rollouts == {ids[0]: [0], ids[1]: [1], ids[2]: [2, 3]}
    first, failed, *fanned = done.samples
    assert (first.id, first.tokens, first.rollout_log_probs) == ("grpo/5-0", [1, 2, 6, 9], [-0.5, 0.0])
    assert (first.loss_mask, first.weight_versions) == ([1, 0], [3, -1])
    assert (first.status, first.temperature, first.reward) == (Status.TRUNCATED, 0.5, None)
    assert first.metadata == {"row": 5, "turns": 2}
    assert first.train_metadata == {"token_rewards": [1.0, 0.0]}
    assert (failed.status, failed.response_length, failed.metadata[INFRA]) == (Status.FAILED, 0, "crashed")
    assert [s.reward for s in fanned] == [1.0, 0.5]


@pytest.fixture
def judge(tmp_path):
    """`judge(group, source)`: the rewards of a run with a rollout buffer whose plugin has the source."""

    def judge(group, source):
        (tmp_path / "judging.py").write_text(f"import slime_core\n\n\n@slime_core.hookimpl\n{source}")
        flags = ["--hf-checkpoint", str(tmp_path), "--rollout-buffer-url", "http://127.0.0.1:9"]
        config = load_config(None, [*flags, "--plugin", str(tmp_path / "judging.py")], models=option_models)
        plugins = load_plugins(config)
        try:
            return asyncio.run(plugins.reward(group, Context(config=config)))
        finally:
            plugins.close()

    return judge


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_rewards_that_came_along_are_used_and_the_run_judges_the_rest(group, judge, kind):
    rollouts = [
        models.Rollout(sample="grpo/5-0", sequences=[made(6, 0.25)]),
        models.Rollout(sample="grpo/5-1", failed="crashed"),
        models.Rollout(sample="grpo/5-2", sequences=[made(7)]),
    ]
    source = """slime_reward(group):
    assert [s.id for s in group.samples] == ["grpo/5-2"]
    assert list(group.rollouts.values()) == [[0]]
    return [0.75]
"""
    rewards = judge(filled(group, ended(*rollouts)), f"{kind} {source}")
    assert rewards == [
        Reward(value=0.25),
        Reward(value=0.0, kind="infra_error", reason="crashed"),
        Reward(value=0.75),
    ]


def test_a_group_that_was_dropped_elsewhere_is_an_infrastructure_error_of_every_sample(group, judge):
    done = filled(group, ended(state="dropped", reason="timeout"))
    rewards = judge(done, "def slime_reward(group):\n    raise AssertionError('there is nothing to judge')\n")
    assert rewards == [Reward(value=0.0, kind="infra_error", reason="timeout")] * 3


def test_a_runs_name_is_made_once_and_kept(tmp_path):
    folder = tmp_path / "my run (2)"
    folder.mkdir()
    name = run_name(folder)
    assert name.startswith("my-run--2--")
    assert run_name(folder) == name
    assert run_name(None) != run_name(None)
    (folder / "rollout_buffer.json").write_text(json.dumps({"run": "../.."}))
    with pytest.raises(DataError, match="does not hold"):
        run_name(folder)


def test_a_missing_token_names_its_variable(config, monkeypatch):
    monkeypatch.delenv("SLIME_BUFFER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="SLIME_BUFFER_TOKEN is not set") as told:
        token_of(config)
    assert told.value.code == "CFG09"


def test_the_server_is_not_started_without_an_engine(ctx):
    rollout = BufferRollout()
    assert rollout._engine(ctx) is None
    asyncio.run(rollout.close())
