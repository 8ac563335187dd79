"""What environments do wrong costs their own episodes; what is missing is named with the command that brings it."""

import asyncio
import dataclasses
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from agent_session import LetterTokenizer, LineEngine

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.types import Group, Sample, SamplingParams, Status
from slime_verifiers.options import Options
from slime_verifiers.plugin import Verifiers
from slime_verifiers.process import EnvironmentProcess, ProcessLost
from slime_verifiers.worker import serve

pytestmark = [pytest.mark.integration, pytest.mark.environments]


class Trial:
    """The plugin around one environment, and an engine that always says the same."""

    def __init__(self, python, **options):
        self.plugin = Verifiers()
        self.options = Options(python=python, heldout=0, env="trouble", **options)
        self.tokenizer = LetterTokenizer()

    async def play(self, words, n=1, lines=("4+4|",), **options):
        """An episode of each word, side by side; each word's samples and rewards, and the engine."""
        options = {"env_args": {"taskset": {"words": words}}, **options}
        ctx = Context(
            config=Config(), engine=LineEngine(self.tokenizer, lines), tokenizer=self.tokenizer,
            sampling=SamplingParams(max_new_tokens=64), options=self.options.model_copy(update=options),
        )  # fmt: skip
        rows = await asyncio.to_thread(self.plugin.slime_prompts, "verifiers", ctx)
        assert len(rows) >= len(words)

        async def one(row):
            prompt = dataclasses.replace(await asyncio.to_thread(rows.at, row), id=f"main/{row}", tokens=[5])
            samples = [Sample(id=f"main/{row}-{j}", tokens=[5], group_index=row, rollout_id=j) for j in range(n)]
            group = Group(prompt=prompt, samples=samples, rollouts={j: [j] for j in range(n)})
            group = await self.plugin.slime_generate(group, ctx)
            return group.samples, self.plugin.slime_reward(group, ctx)

        episodes = await asyncio.gather(*map(one, range(len(words))))
        return dict(zip(words, episodes, strict=True)), ctx.engine

    def problem(self, **options):
        """The only thing that is said of a config."""
        options = {"env": "trouble", "python": self.options.python, **options}
        (problem,) = self.plugin.slime_config_rules(Config(plugin={"verifiers": options}))
        return problem

    def process(self):
        """The only process there is, None before it starts."""
        processes = [
            each for pool in self.plugin._pools.values() for each in pool._processes.get(self.options.python, ())
        ]
        return processes[0] if processes else None


def below(parent):
    """Process ids of a process's children."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pids += [int(path.parent.name)] * (int(path.read_text().rpartition(")")[2].split()[1]) == parent)
    return pids


def commands():
    """Of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode())
    return lines


@pytest.fixture
def trial(environments_python, environment_path):
    opened = []

    def trial(**options):
        opened.append(Trial(environments_python, **options))
        return opened[-1]

    yield trial
    for one in opened:
        one.plugin._close()


def kinds(episodes):
    return {word: {reward.kind for reward in rewards} for word, (_, rewards) in episodes.items()}


def test_an_environment_that_fails_costs_its_own_episodes_and_is_started_again(trial):
    trial = trial(episode_seconds=1200)

    async def run():
        bad = ["raises", "nan", "waits"]
        playing = asyncio.ensure_future(trial.play(["fine", *bad], n=2))
        most = 0
        while not (most == 8 and trial.process().running == 2):  # only the two that wait
            await asyncio.sleep(0.02)
            most = max(most, trial.process().running if trial.process() else 0)
        (worker,) = below(trial.process().pid)
        os.kill(worker, signal.SIGKILL)
        episodes, engine = await playing
        assert kinds(episodes) == {"fine": {"score"}} | {word: {"infra_error"} for word in bad}
        samples, rewards = episodes["fine"]
        assert {reward.value for reward in rewards} == {sum((52, 2 * 43, 3 * 52)) % 101 / 101}
        drawn = [[-(number + place / 1000) - 0.001 for place in range(4)] for number in range(len(engine.requests))]
        for sample in samples:
            assert sample.response_tokens == trial.tokenizer.ids("4+4|")
            assert sample.rollout_log_probs in drawn
        assert "JUDGE_API_KEY" in episodes["raises"][1][0].reason
        assert "judged is nan" in episodes["nan"][1][0].reason
        assert "signal 9" in episodes["waits"][1][0].reason

        episodes, _ = await trial.play(["aborts"])
        assert "something went badly wrong" in episodes["aborts"][1][0].reason
        assert "signal 6" in episodes["aborts"][1][0].reason
        assert not [line for line in commands() if line.startswith("sleep 3601")]
        episodes, _ = await trial.play(["fine"])
        assert kinds(episodes) == {"fine": {"score"}}
        episodes, _ = await trial.play(["waits"], episode_seconds=0.5)
        assert "longer than 0.5 s" in episodes["waits"][1][0].reason

        episodes, _ = await trial.play(["a"], lines=("4+4|", "well|"), env="two-voices", env_args={})
        (samples, rewards) = episodes["a"]
        assert [(s.role, s.response, s.remove_sample) for s in samples] == [
            ("writer", "4+4", False),
            ("critic", "well", True),
        ]
        assert [(reward.value, reward.terms) for reward in rewards] == [
            (1.0, {"agreement": 1.0}),
            (0.25, {"agreement": 0.25}),
        ]
        stopped, _ = await trial.play(["fine"], n=4, lines=("<abort>",))
        assert {sample.status for sample in stopped["fine"][0]} == {Status.ABORTED}
        assert trial.process().failures == 0

        args = {"id": "best-of-n", "n": 2}
        episodes, _ = await trial.play(["a"], lines=("45|", "4x|"), env="digit-share", env_args=args)
        (samples, rewards) = episodes["a"]
        assert [(s.role, reward.terms["digits"]) for s, reward in zip(samples, rewards, strict=True)] == [
            ("policy", 1),
            ("policy", 0.5),
        ]

        hanging = asyncio.ensure_future(trial.play(["hangs"]))
        while not (trial.process() and "hanging now" in trial.process().last_words()):
            await asyncio.sleep(0.02)
        (pool,) = trial.plugin._pools.values()
        options = trial.options.model_copy(update={"env_args": {"taskset": {"words": ["hangs"]}}})
        try:
            task = await asyncio.wait_for(asyncio.to_thread(pool.task, options, 0, evaluation=False), 60)
        finally:
            (worker,) = below(trial.process().pid)
            os.kill(worker, signal.SIGKILL)
        assert task["prompt"] == "hangs"
        episodes, _ = await hanging
        assert kinds(episodes) == {"hangs": {"infra_error"}}

    missing = trial.problem(env="textarenna")
    assert ("did you mean 'textarena'?" in missing.fix, "pip install textarenna" in missing.fix) == (True, True)
    keyless = trial.problem(env_args={"taskset": {"wants_key": True}})
    assert "TROUBLE_API_KEY" in keyless.why
    assert "taskset.wordz" in trial.problem(env_args={"taskset": {"wordz": 1}}).why
    asyncio.run(run())


def test_a_process_that_reads_nothing_holds_up_nobody(environments_python, monkeypatch):
    monkeypatch.setattr("slime_verifiers.process.TO_END", 0.5)
    process = EnvironmentProcess(environments_python, 0)
    process.version.result(120)
    (worker,) = below(process.pid)
    os.kill(worker, signal.SIGSTOP)
    replies = [process.ask(do="load", env={"words": "x" * (1 << 20)}) for _ in range(2)]  # more than a pipe takes
    process.cancel(replies[0][0])
    process.close()
    for _, reply in replies:
        with pytest.raises(ProcessLost):
            reply.result(60)
    assert not Path(f"/proc/{worker}").exists()


def test_a_model_call_that_the_environment_gives_up_ends_at_slime_too(monkeypatch):
    monkeypatch.setenv(serve.KEY, "")

    async def run():
        came, gone = asyncio.Event(), asyncio.Event()

        async def slime(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            came.set()
            while await reader.read(1000):
                pass
            gone.set()
            writer.close()

        server = await asyncio.start_server(slime, "127.0.0.1", 0)
        async with server, AsyncExitStack() as stack:
            relay = serve.Relay()
            await relay.start(stack)
            relay.sessions["trace"] = (f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key")
            client = await stack.enter_async_context(aiohttp.ClientSession())
            headers = {serve.SESSION: "trace", "authorization": f"Bearer {os.environ[serve.KEY]}"}
            call = asyncio.ensure_future(client.post(f"{relay.url}/chat/completions", json={}, headers=headers))
            await came.wait()
            call.cancel()
            await asyncio.wait_for(gone.wait(), 60)

    asyncio.run(run())


def test_an_interpreter_without_verifiers_and_none_at_all_are_named(trial):
    trial = trial()
    assert 'pip install "verifiers>=0.4"' in trial.problem(python=sys.executable).fix
    assert "there is no interpreter" in trial.problem(python="/nowhere/python").what
    trial.plugin._close()
    late = Verifiers().slime_config_rules(
        Config(plugin={"verifiers": {"env": "x", "python": "/no", "episode_seconds": 3600.0}})
    )
    assert {"rollout.generate_timeout"} <= {".".join(key) for problem in late for key in problem.keys}


def test_the_environment_of_the_page_is_the_one_that_trains():
    page = Path(__file__).parents[3] / "docs" / "environments.md"
    code = (Path(__file__).parent / "environments" / "digit_share" / "digit_share" / "__init__.py").read_text()
    assert len(code.splitlines()) <= 30
    assert f"```python\n{code}```" in page.read_text()


@pytest.mark.nightly
def test_hanging_exiting_babbling_leaking_and_hoarding_environments_cost_their_own_episodes(trial):
    trial = trial(memory_mb=2048)

    async def run():
        words = (("hangs", 1.0), ("exits", 60.0), ("babbles", 60.0), ("leaks", 60.0), ("sockets", 60.0))
        for word, seconds in words:
            for _ in range(3 if word in ("leaks", "sockets") else 1):  # a worn process is replaced
                episodes, _ = await trial.play([word], episode_seconds=seconds)
                assert kinds(episodes) == {word: {"infra_error"}}, word
                assert word != "exits" or "no license" in episodes[word][1][0].reason
            assert not [line for line in commands() if line.startswith("sleep 3602")]
            episodes, _ = await trial.play(["fine"], episode_seconds=60.0)
            assert kinds(episodes) == {"fine": {"score"}}, word

    asyncio.run(run())
