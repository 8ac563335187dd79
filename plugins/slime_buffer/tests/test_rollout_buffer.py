"""A rollout buffer with every process real: killed in the middle of a storm, and a run that trains on what it brings."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest

from slime_buffer.client import BufferClient
from slime_buffer.service import models
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

TOKEN = "a-token-of-the-storm"
MAKER = """
from slime_buffer.generator import Story

async def two_turns(task):
    story = Story(task)
    story.say(await task.ask(story.tokens))
    story.tell(task.tokens)
    story.say(await task.ask(story.tokens))
    said = [token for turn in story.turns for token in turn.tokens]
    return story.sequence(reward=sum(token % 2 for token in said) / len(said), turns=len(story.turns))
"""


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "SLIME_BUFFER_TOKEN": TOKEN, "NO_COLOR": "1", **more}


def start(*args, cwd, **more):
    command = [sys.executable, "-m", "slime_cli.main", *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


class Service:
    """A `slime buffer serve` process that can be killed and comes back on its port."""

    def __init__(self, folder):
        self.folder, self.port, self.kills = folder, 0, 0
        self.start()

    def start(self, **more):
        self.process = start("buffer", "serve", self.folder, "--port", self.port, cwd=self.folder.parent, **more)
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.stderr.read()
        self.port = int(self.url.rpartition(":")[2])

    def kill(self):
        self.process.kill()
        self.process.communicate()
        self.kills += 1
        self.start()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path / "buffer")
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


# -- a storm


class Storm:
    """A trainer that asks, generators that write, an agent that pushes and a reader that may die, until all is read."""

    def __init__(self, service, groups, kills, seed):
        self.service, self.kills = service, kills
        self.names = [f"storm/{n}" for n in range(groups)]
        self.pushed = [f"agent/{n}" for n in range(groups // 4)]
        self.random = random.Random(seed)
        self.ledger = {}  # what a trainer would have made durable, by group id
        self.seen = Counter()
        self.done = 0
        self.progress = asyncio.Event()

    def step(self):
        self.done += 1
        self.progress.set()

    def client(self):
        return BufferClient(self.service.url, TOKEN, deadline=120, attempt=10)

    def over(self):
        return set(self.ledger) == {*self.names, *self.pushed} and self.acknowledged

    async def run(self):
        self.acknowledged = False
        works = [self.ask(), self.push(), self.read(), self.strike(), *(self.generate(n) for n in range(3))]
        async with asyncio.timeout(240):
            await asyncio.gather(*works)

    async def ask(self):
        async with self.client() as client:
            for first in range(0, len(self.names), 4):
                groups = [self.wanted(name) for name in self.names[first : first + 4]]
                await client.start_rollout(models.Ask(run="run", groups=groups))
                self.step()

    def wanted(self, name):
        samples = [models.Wanted(id=f"{name}-{j}") for j in range(3)]
        return models.AskedGroup(id=name, samples=samples, sampling=models.Sampling(max_new_tokens=4))

    async def push(self):
        async with self.client() as client:
            for name in self.pushed:
                rollouts = [models.Rollout(sample=f"{name}-0", sequences=[self.sequence(name, 0)])]
                await client.push(models.Push(run="run", groups=[models.PushedGroup(id=name, rollouts=rollouts)]))
                self.step()

    async def generate(self, number):
        async with self.client() as client:
            while not self.over():
                for work in await client.claim_work(f"gen-{number}", count=2, lease_seconds=2, wait_seconds=0.2):
                    if self.random.random() < 0.2:
                        continue  # this generator died: its lease ends
                    for sample in work.samples:
                        j = int(sample.id.rpartition("-")[2])
                        failed = "no" if j == 2 and sum(work.id.encode()) % 3 == 0 else ""
                        sequences = [] if failed else [self.sequence(work.id, j)] * (1 + j)
                        row = models.Trajectory(group=work.id, sample=sample.id, sequences=sequences, failed=failed)
                        await client.write("run", [row])
                        self.step()

    def sequence(self, name, j):
        mark = sum(name.encode()) * 10 + j
        return models.Sequence(
            tokens=[1, 2, mark],
            response_length=1,
            log_probs=[-mark / 1e6],
            weight_versions=[0],
            reward=mark / 7,
        )

    async def read(self):
        async with self.client() as client:
            restart = True
            while not self.over():
                claimed = await client.claim_batch(
                    "t", "run", count=5, lease_seconds=2, wait_seconds=0.2, restart=restart
                )
                restart = False
                for ended in claimed.groups:
                    self.seen[ended.id] += 1
                    made = [s.model_dump() for rollout in ended.rollouts for s in rollout.sequences]
                    failed = [rollout.failed for rollout in ended.rollouts]
                    assert self.ledger.setdefault(ended.id, (made, failed)) == (made, failed), "other samples came"
                if claimed.claim and self.random.random() < 0.2:
                    restart = True  # the reader died after its own commit, before the acknowledgement
                    continue
                if claimed.claim:
                    await client.acknowledge(claimed.claim)
                    self.step()
                self.acknowledged = not claimed.groups and len(self.ledger) == len(self.names) + len(self.pushed)

    async def strike(self):
        """Kill the service each time so much has happened, at whatever it then does."""
        for _ in range(self.kills):
            goal = self.done + self.random.randint(3, 12)
            while self.done < goal and not self.over():
                self.progress.clear()
                await self.progress.wait()
            await asyncio.get_running_loop().run_in_executor(None, self.service.kill)


def storm(service, groups, kills, seed=0):
    """Run it; the books afterwards."""

    async def body():
        made = Storm(service, groups, kills, seed)
        await made.run()
        async with made.client() as client:
            return made, await client.stats()

    made, stats = asyncio.run(body())
    rollouts = [failed for _, all_failed in made.ledger.values() for failed in all_failed]
    sequences = sum(len(sequences) for sequences, _ in made.ledger.values())
    assert stats.conserved
    assert stats.groups == {"open": 0, "finished": 0, "dropped": 0, "read": groups + groups // 4}
    assert stats.samples["read"] == sequences
    assert stats.samples["pending"] == 0
    assert stats.samples.get("dropped/failed", 0) == sum(map(bool, rollouts))
    assert stats.samples["issued"] == sequences + sum(map(bool, rollouts))
    assert stats.queues == dict.fromkeys(stats.queues, 0)
    assert service.kills == kills
    return made


@pytest.mark.nightly
def test_a_service_killed_in_a_storm_loses_and_doubles_nothing(service):
    """SIGKILL in the middle of asks, claims, writes and acknowledgements; the clients go on."""
    made = storm(service, groups=16, kills=3)
    assert set(made.seen) == {*made.names, *made.pushed}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_service_killed_forty_times_loses_and_doubles_nothing(service, seed):
    storm(service, groups=200, kills=40, seed=seed)


def test_sigterm_ends_the_service_in_order_with_claims_waiting(service):
    """Waiting requests are answered, the socket is freed, nothing is left of the process."""

    async def body():
        async with BufferClient(service.url, TOKEN) as client:
            waiting = asyncio.create_task(client.claim_work("g", wait_seconds=30))
            busy = asyncio.create_task(client.claim_batch("t", "run", wait_seconds=30))
            while (await client.stats()).queues["open"] or waiting.done():
                pass
            done = await asyncio.get_running_loop().run_in_executor(None, service.end)
            assert await waiting == []
            assert (await busy).groups == []
            return done

    code, err = asyncio.run(body())
    assert code == 0, err
    assert "ended in order" in err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(service.process.pid, 0)


def test_one_folder_has_one_service(service, tmp_path):
    second = start("buffer", "serve", service.folder, cwd=tmp_path)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 7
    assert "STO116" in err
    assert out == ""


# -- a run


@pytest.fixture
def work(tmp_path):
    tiny_model(tmp_path / "model")
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(5)]
    (tmp_path / "maker.py").write_text(MAKER)
    (tmp_path / "my_reward.py").write_text("def reward(sample):\n    raise RuntimeError('the rewards came along')\n")
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@contextmanager
def generating(service, cwd):
    process = start(
        *("buffer", "generate", service.url, "--function", "maker.py:two_turns", "--lease-seconds", "5"), cwd=cwd
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err


FLAGS = (
    *("--hf-checkpoint", "model", "--prompt-data", "my.jsonl", "--label-key", "label", "--num-rollout", "3"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4", "--lr", "1e-3"),
    *("--cpu-threads", "1", "--dtype", "float32", "--advantage-estimator", "reinforce_plus_plus"),
    *("--save-interval", "2", "--custom-rm-path", "my_reward.py:reward"),
)


def run(service, name, cwd, **env):
    process = start("run", *FLAGS, "--rollout-buffer-url", service.url, "--run-dir", name, cwd=cwd, **env)
    _, err = process.communicate(timeout=240)
    return process.returncode, err


def final(folder):
    return (folder / "final" / "model.safetensors").read_bytes()


def test_a_run_trains_on_what_another_process_makes(service, work, forked_slime):
    """Turns, masks, versions and rewards are the generator's; the run's own reward, which raises, is not asked."""
    flags = (*FLAGS, "--rollout-buffer-url", service.url, "--run-dir", "whole")
    with generating(service, work):
        done = forked_slime("run", *flags, cwd=work, SLIME_BUFFER_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
    err = done.stderr
    lines = [json.loads(line) for line in (work / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines if line["kind"] == "step"] == [1, 2, 3]
    assert re.search(r"12 issued = 12 trained", err), err
    assert final(work / "whole") != (work / "model" / "model.safetensors").read_bytes(), "training changed nothing"
    for sample in stored(work / "whole"):
        assert sample.metadata["turns"] == 2
        assert 0 <= sample.reward <= 1
        told = [place for place, on in enumerate(sample.loss_mask) if not on]
        assert len(told) == sample.prompt_length, "the second turn's prompt does not train"
        assert [sample.tokens[sample.prompt_length + place] for place in told] == sample.tokens[: sample.prompt_length]
        assert {sample.weight_versions[place] for place in told} == {-1}
        made = {version for version in sample.weight_versions if version >= 0}
        assert len(made) == 1, "in a synchronous run one version makes a sample"
    stats = json.loads(_stats(service, work))
    assert stats["conserved"]
    assert stats["groups"] == {"open": 0, "finished": 0, "dropped": 0, "read": 6}
    assert stats["samples"] == {"issued": 12, "pending": 0, "read": 12}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["ledger.finish.after:3", "loop.stepped:2", "ledger.trained.after:2"])
def test_a_killed_run_ends_in_the_same_weights_and_asks_for_nothing_twice(service, work, point):
    """The run is killed, the service too; the generator goes on, and the run is resumed."""
    with generating(service, work):
        code, err = run(service, "whole", work)
        assert code == 0, err
        code, err = run(service, "killed", work, SLIME_FAILPOINT=f"{point}=kill")
        assert code == -signal.SIGKILL, err
        service.kill()
        resumed = start("run", "--resume", "killed", cwd=work)
        _, err = resumed.communicate(timeout=600)
        assert resumed.returncode == 0, err
    assert final(work / "killed") == final(work / "whole")
    assert re.search(r"12 issued = 12 trained", err), err
    stats = json.loads(_stats(service, work))
    assert stats["conserved"]
    assert stats["groups"] == {"open": 0, "finished": 0, "dropped": 0, "read": 12}
    assert stats["samples"] == {"issued": 24, "pending": 0, "read": 24}


def stored(folder):
    """The samples of every step, as the run's ledger has them."""

    async def body():
        ledger = SqliteLedger(folder)
        try:
            names = [name for version in (1, 2, 3) for name in await ledger.composition(version)]
            return await ledger.samples(names)
        finally:
            await ledger.close()

    return asyncio.run(body())


def _stats(service, cwd):
    process = start("buffer", "stats", service.url, "--json", cwd=cwd)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out
