"""Whole runs on a server that slime starts: one that is killed within an episode and goes on, and one that learns."""

import hashlib
import json
import signal
import time

import pytest
from openenv_play import command, servers_of
from recorded import steps_of

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

RECIPE = """
plugins = ["openenv"]

[data]
tasks = [{{ name = "letters", plugin = "openenv" }}]

[rollout]
hf_checkpoint = "model"
num_rollout = 3
rollout_batch_size = 2
n_samples_per_prompt = 3
rollout_max_response_len = 12

[train]
lr = 1e-2
dtype = "float32"

[cluster]
cpu_threads = 1

[report]
save_interval = 1

[plugin.openenv]
command = {command}
prompt = "letters"
cut_answer = "act"
"""
SHOW = '''
"""The hint; at the call that HALT numbers the process is killed."""
import itertools
import os
import signal

calls = itertools.count(1)


def show(observation):
    if next(calls) == int(os.environ.get("HALT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return observation["hint"]
'''


@pytest.fixture
def train(forked_slime, tmp_path):
    tiny_model(tmp_path / "model", hidden=32)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(command=json.dumps(command(tmp_path))))
    (tmp_path / "show.py").write_text(SHOW)

    def train(*args, **env):
        return forked_slime("run", *args, cwd=tmp_path, **env)

    return train


@pytest.mark.nightly
def test_a_run_that_is_killed_within_an_episode_ends_in_the_same_weights(train, tmp_path):
    """Two calls before each episode's third answer: the 25th is within the second step."""
    ahead = ("--no-colocate", "--max-staleness", "1", "--async-schedule", "lockstep")
    flags = ("recipe.toml", *ahead, "plugin.openenv.observation_path=show.py:show", "--run-dir")
    assert (done := train(*flags, "whole")).returncode == 0, done.stderr
    assert train(*flags, "cut", HALT="25").returncode == -signal.SIGKILL
    while servers_of(tmp_path):  # they end with the run that was killed
        time.sleep(0.05)
    assert (done := train("--resume", "cut")).returncode == 0, done.stderr
    whole, cut = (
        hashlib.sha256((tmp_path / name / "final" / "model.safetensors").read_bytes()).hexdigest()
        for name in ("whole", "cut")
    )
    assert whole == cut
    steps, counts = steps_of(tmp_path / "cut", 3)
    assert counts["issued"] == counts["trained"] == 18
    assert [len(sample.metadata["openenv"]["turn_rewards"]) for step in steps for sample in step] == [3] * 18
    assert {sample.metadata["openenv"]["ended"] for step in steps for sample in step} == {"done"}
    assert not servers_of(tmp_path)


@pytest.mark.nightly
def test_a_model_learns_to_answer_with_the_letter_that_is_asked_for(train, tmp_path):
    flags = ("--rollout-max-response-len", "1", "--num-rollout", "40", "--rollout-batch-size", "16")
    more = ("--n-samples-per-prompt", "8", "--lr", "5e-3", "--save-interval", "40", "--run-dir", "learns")
    assert (done := train("recipe.toml", *flags, *more)).returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "learns" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["metrics"]["reward/mean"] for line in lines if line["kind"] == "step"]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.3
