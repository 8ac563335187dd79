"""The example with every process real: the environment, an episode by hand, a run that learns while it dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from slime_buffer.client import BufferClient
from slime_buffer.generator import Away, Task
from slime_buffer.service import models
from slime_core.plugins.locate import locate

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "plugins" / "slime_rm_math" / "src" / "slime_rm_math" / "model"
TOKENS = {"GAME_TOKEN": "of-the-environment", "SLIME_BUFFER_TOKEN": "a-token-of-the-buffer"}
HEADERS = {"authorization": "Bearer of-the-environment"}
SLIME = (sys.executable, "-m", "slime_cli.main")


@contextmanager
def process(*command, **env):
    """A process that is ended on the way out, whatever it has become."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **TOKENS, **env}
    with subprocess.Popen(
        [str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as found:
        try:
            yield found
        finally:
            if found.poll() is None:
                found.kill()


class Environment:
    """server.py, which can be killed and comes back on its port."""

    def __init__(self, stack, *options):
        self._stack, self._options, self._port = stack, options, 0
        self.start()

    def start(self):
        command = (sys.executable, HERE / "server.py", "--port", self._port, *self._options)
        self._process = self._stack.enter_context(process(*command))
        self.url = self._process.stdout.readline().strip()
        assert self.url, self._process.stderr.read()
        self._port = int(self.url.rpartition(":")[2])

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def stack():
    with ExitStack() as found:
        yield found


@pytest.fixture
def environment(stack):
    return Environment(stack)


def client(environment):
    return httpx.Client(base_url=environment.url, headers=HEADERS, trust_env=False)


# Problem 9 of the shuffled rooms: from the middle of the west side to the key in the corner south-east, and to the
# door in the middle.
PROBLEM = 9
WAY = [("e", "key: se"), ("s", "key: e"), ("e", "door: nw"), ("n", "door: w"), ("w", "out")]


@pytest.mark.integration
def test_a_step_is_played_once_however_often_it_is_sent(environment):
    with client(environment) as http:
        begun = http.post("/episodes", json={"problem": PROBLEM}).json()
        assert begun["steps"] == len(WAY) + 2
        url = f"/episodes/{begun['episode']}/steps"
        for number, (action, told) in enumerate(WAY, 1):
            body = {"number": number, "action": action}
            first, again = http.post(url, json=body), http.post(url, json=body)
            last = number == len(WAY)
            assert first.json() == again.json() == {"observation": told, "reward": float(last), "done": last}
        assert http.post(url, json={"number": 2, "action": "w"}).status_code == 409
        assert http.post(url, json={"number": 6, "action": "n"}).status_code == 409
        assert http.delete(f"/episodes/{begun['episode']}").status_code == 200
        assert http.post(url, json=body).status_code == 404


@pytest.mark.integration
def test_a_malformed_request_is_refused_and_harms_nobody(environment):
    with client(environment) as http:
        for token in (b"Bearer \xe9", b"Bearer", b""):
            assert http.post("/episodes", json={"problem": 0}, headers={"authorization": token}).status_code == 401
        assert http.post("/episodes", json={"problem": 10**6}).status_code == 404
        assert http.post("/episodes", json={"room": 1}).status_code == 422
        assert http.post("/episodes", json={"problem": "x" * 5000}).status_code == 413
        assert http.get("/episodes").status_code == 501
        assert http.post("/episodes", json={"problem": 0}).status_code == 200


@pytest.mark.integration
def test_an_episode_that_nobody_calls_makes_room(stack):
    environment = Environment(stack, "--most", 1, "--idle", 0.1)
    with client(environment) as http:
        begun = http.post("/episodes", json={"problem": 0}).json()
        statuses = [http.post("/episodes", json={"problem": 1}).status_code]
        while statuses[-1] == 429:
            statuses.append(http.post("/episodes", json={"problem": 1}).status_code)
        assert statuses[-1] == 200
        assert http.post(f"/episodes/{begun['episode']}/steps", json={"number": 1, "action": "n"}).status_code == 404


# -- one episode


def played(answers, environment, monkeypatch):
    """What ``play`` makes of a model that answers with these texts."""
    monkeypatch.setenv("GAME_TOKEN", TOKENS["GAME_TOKEN"])
    monkeypatch.setenv("GAME_URL", environment.url)
    monkeypatch.setenv("GAME_MODEL", str(MODEL))
    play = locate(f"{HERE / 'generator.py'}:play", "--function")
    tokenizer = locate(f"{HERE / 'generator.py'}:tokenizer", "--function")()
    texts = iter(answers)

    def engine(request):
        text = next(texts)
        ids = [*tokenizer.encode(text), 1]
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [2] * len(ids),
            "finish_reason": {"type": "stop"},
        }
        return httpx.Response(200, json={"text": text, "output_ids": ids, "meta_info": meta})

    async def body():
        work = models.Work(
            id="grpo/1",
            lease="w1",
            run="run",
            tokens=tokenizer.encode("key: se\n"),
            metadata={"problem": PROBLEM},
            samples=[],
            sampling=models.Sampling(max_new_tokens=4),
            version=2,
            engine=models.EngineEndpoint(url="http://127.0.0.1:1"),
        )
        async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
            return await play(Task(work, "grpo/1-0", 7, http))

    return asyncio.run(body()), tokenizer


@pytest.mark.integration
def test_observations_stand_between_answers_and_do_not_train(environment, monkeypatch):
    made, tokenizer = played([action for action, _ in WAY], environment, monkeypatch)
    text = "key: se\ne<eos>\nkey: se\ns<eos>\nkey: e\ne<eos>\ndoor: nw\nn<eos>\ndoor: w\nw<eos>"
    assert tokenizer.decode(made.tokens) == text
    trained = [t for t, on in zip(made.tokens[-made.response_length :], made.loss_mask, strict=True) if on]
    assert tokenizer.decode(trained) == "e<eos>s<eos>e<eos>n<eos>w<eos>"
    assert made.log_probs == [-0.5 * on for on in made.loss_mask]
    assert made.weight_versions == [2 if on else -1 for on in made.loss_mask]
    assert (made.reward, made.metadata["steps"]) == (1.0, 5)


@pytest.mark.integration
def test_an_episode_ends_without_reward_when_its_steps_are_used_up(environment, monkeypatch):
    made, _ = played(["what?", "n", "s", "n", "s", "n", "s"], environment, monkeypatch)
    assert (made.reward, made.metadata["steps"]) == (0.0, 7)


@pytest.mark.integration
def test_an_environment_that_is_away_costs_no_try(environment, monkeypatch):
    environment.kill()
    with pytest.raises(Away, match="ConnectError"):
        played(["n"], environment, monkeypatch)


# -- the whole


@contextmanager
def served(environment, folder):
    """A buffer and a generator; the answer is the buffer's address and the generator's process."""
    with process(*SLIME, "buffer", "serve", folder) as buffer:
        url = buffer.stdout.readline().strip()
        game = {"GAME_URL": environment.url, "GAME_MODEL": str(MODEL)}
        function = f"{HERE / 'generator.py'}:play"
        with process(*SLIME, "buffer", "generate", url, "--function", function, "--json", **game) as generator:
            yield url, generator


def strike(environment, url, generator, after, noted):
    """Kill the environment when ``after`` samples are made; it comes back when the generator has missed it."""

    async def made():
        async with BufferClient(url, TOKENS["SLIME_BUFFER_TOKEN"]) as client:
            while (await client.stats()).samples.get("read", 0) < after:
                await asyncio.to_thread(threading.Event().wait, 0.05)

    asyncio.run(made())
    environment.kill()
    for line in generator.stderr:
        noted.append(line)
        if "the environment" in line:
            break
    environment.start()
    noted += generator.stderr  # until it ends


def stats_of(url):
    async def body():
        async with BufferClient(url, TOKENS["SLIME_BUFFER_TOKEN"]) as client:
            return await client.stats()

    return asyncio.run(body())


def survived(environment, train, folder, *flags):
    """A run whose environment dies after 64 samples: its folder, the buffer's state and the generator's counts."""
    noted = []
    with served(environment, folder / "buffer") as (url, generator):
        killer = threading.Thread(target=strike, args=(environment, url, generator, 64, noted))
        killer.start()
        run = train(HERE / "recipe.toml", "--rollout-buffer-url", url, *flags, GAME_URL=environment.url, **TOKENS)
        stats = stats_of(url)
        generator.send_signal(signal.SIGTERM)
        counts = json.loads(generator.stdout.read())
        killer.join()
    assert counts["away"] > 0, noted
    return run, stats, counts


def assert_nothing_lost(run, stats, counts, steps, warmup):
    assert stats.conserved
    assert stats.groups == {"open": 0, "finished": 0, "dropped": 0, "read": 8 * steps}
    assert stats.samples == {"issued": 64 * steps, "pending": 0, "read": 64 * steps}
    assert counts["stored"] == 64 * steps
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row["metrics"] for row in rows if row["kind"] == "step"][-1]
    assert last["ledger/trained"] == 64 * (warmup + steps)
    assert last["ledger/dropped"] == last["ledger/pending"] == 0


@pytest.mark.system
@pytest.mark.nightly
def test_a_run_loses_nothing_when_the_environment_dies(environment, train, tmp_path):
    flags = ("stage.warmup.num_rollout=10", "stage.grpo.num_rollout=3")
    assert_nothing_lost(*survived(environment, train, tmp_path, *flags), steps=3, warmup=10)


@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_run_learns_and_loses_nothing_when_the_environment_dies(environment, train, scores, tmp_path, seed):
    run, stats, counts = survived(environment, train, tmp_path, "--seed", seed)
    before, after = scores(run, "held_out")
    assert before < 0.7, "the warm-up imitates a player who stumbles"
    assert after >= 0.9
    assert_nothing_lost(run, stats, counts, steps=7, warmup=30)
