"""Rewards that ask for a process of their own: same answers, a deadline that kills, and nothing left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from slime_core.config.schema import Config
from slime_core.errors import PluginError
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.integration

SOURCE = """
import os, signal, sys, time
from slime_core import Reward
from slime_core.hookspecs import own_process

def judged(sample):
    what = sample.metadata.get("do", "")
    if what == "spin":
        while True:
            pass
    if what == "backtrack":
        import re
        re.match(r"(a+)+$", "a" * 64 + "b")
    if what == "swallow":
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise ValueError("no such unit")
    if what == "print":
        print("to stdout")
    return Reward(value=0.25 * sample.response_length, terms={"pid": float(os.getpid())}, reason=sample.label)
"""
TYPE = (
    SOURCE
    + """
@own_process
def mine(sample, ctx):
    return judged(sample)

@slime_core.hookimpl
def slime_reward_types():
    return {"mine": mine}
"""
)
HOOK = (
    SOURCE
    + """
@slime_core.hookimpl
@own_process
def slime_reward(group, ctx):
    assert ctx.version == 7 and ctx.config.seed == 5 and group.rollouts == {6: [0], 7: [1]}
    return [judged(sample) for sample in group.samples]
"""
)


def group_of(do="", **metadata):
    prompt = Prompt(id="main/3", position=3, prompt="1+1=", tokens=[2, 12], label="2", metadata={"row": 1})
    samples = [Sample(id=f"main/3-{j}", tokens=[2, 12], label="2", rollout_id=6 + j) for j in range(2)]
    for j, sample in enumerate(samples):
        sample.append_response([1] * (j + 1), [-0.5] * (j + 1), version=0)
        sample.metadata = {"do": do if j else "", **metadata}
    return Group(prompt=prompt, samples=samples, rollouts={6: [0], 7: [1]})


@pytest.fixture
def alive(load, ctx):
    """Load a plugin and ask for rewards on one loop; afterwards none of its processes lives."""

    def make(source, seconds=60.0, **sections):
        config = {"seed": 5, "reward": {"rm_type": "mine" if "mine" in source else "", "reward_timeout": seconds}}
        plugins = load(config, geo=source)
        told = {name: getattr(ctx, name) for name in ctx.__slots__}
        used = type(ctx)(**{**told, "config": Config(plugins=("geo",), **config), "version": 7})
        return plugins, used

    return make


def pids_of(rewards):
    return {int(reward.terms["pid"]) for reward in rewards}


def pids_of_workers(plugins):
    return [worker.process.pid for worker in plugins._processes._all]


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("source", [TYPE, HOOK], ids=["reward type", "hook"])
def test_a_reward_in_a_process_answers_as_one_beside_the_loop_does(alive, source):
    """The isolated kind; the sample and the context arrive as they are."""
    plugins, ctx = alive(source)
    rewards = asyncio.run(plugins.reward(group_of(do="print"), ctx))
    assert [(r.value, r.reason) for r in rewards] == [(0.25, "2"), (0.5, "2")]
    assert os.getpid() not in pids_of(rewards)
    (pid, *_) = pids_of_workers(plugins)
    plugins.close()
    assert not lives(pid)


@pytest.mark.parametrize("harm", ["spin", "backtrack", pytest.param("swallow", marks=pytest.mark.nightly)])
def test_a_reward_that_hangs_in_its_process_is_killed_and_the_next_one_is_judged(alive, harm):
    """Even one that holds the interpreter's lock, and one that swallows every exception."""
    plugins, ctx = alive(TYPE, seconds=1.0)

    async def work():
        good = await plugins.reward(group_of(), ctx)
        with pytest.raises(PluginError) as caught:
            await plugins.reward(group_of(do=harm), ctx)
        return good, caught.value, await plugins.reward(group_of(), ctx)

    before, error, after = asyncio.run(work())
    assert error.code == "PLG60"
    assert "geo.slime_reward_types did not answer in 1 s for sample 'main/3-1'" in error.what
    assert "reward.reward_timeout=2" in error.fix
    assert not plugins.ends_run(error, Config(rollout={"on_plugin_error": "drop"}))
    assert [r.value for r in before] == [r.value for r in after]
    assert all(lives(pid) for pid in pids_of_workers(plugins))


@pytest.mark.parametrize(
    ("harm", "code", "told"),
    [
        ("segfault", "PLG62", "ended its process by SIGSEGV"),
        ("exit", "PLG62", "ended its process with exit code 3"),
        ("raise", "PLG56", "ValueError: no such unit"),
    ],
)
def test_a_reward_that_ends_its_process_loses_one_answer(alive, harm, code, told):
    """Os._exit and a crash are the process's alone."""
    plugins, ctx = alive(HOOK)

    async def work():
        with pytest.raises(PluginError) as caught:
            await plugins.reward(group_of(do=harm), ctx)
        return caught.value, await plugins.reward(group_of(), ctx)

    error, after = asyncio.run(work())
    assert error.code == code
    assert told in error.what
    assert "prompt 'main/3'" in error.what
    assert "geo (dist-geo==1.0)" in error.where
    assert [r.value for r in after] == [0.25, 0.5]


def test_what_is_no_json_cannot_travel_and_the_process_stays(alive):
    """Told with the fix."""
    plugins, ctx = alive(HOOK)

    async def work():
        await plugins.reward(group_of(), ctx)
        with pytest.raises(PluginError) as caught:
            await plugins.reward(group_of(thing=object()), ctx)
        return caught.value

    error = asyncio.run(work())
    assert error.code == "PLG57"
    assert "JSON" in error.why + error.fix


def test_a_reward_that_is_cancelled_takes_its_process_with_it(alive):
    """An answer that nobody waits for must not be taken for the next one's."""
    plugins, ctx = alive(HOOK)

    async def work():
        await plugins.reward(group_of(), ctx)
        (pid,) = pids_of_workers(plugins)
        task = asyncio.create_task(plugins.reward(group_of(do="swallow"), ctx))
        while not pids_of_workers(plugins) or plugins._processes._idle:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return pid, await plugins.reward(group_of(), ctx)

    pid, after = asyncio.run(work())
    assert not lives(pid)
    assert [r.value for r in after] == [0.25, 0.5]


def test_a_process_of_a_reward_dies_with_the_run(tmp_path):
    """Even where the run is killed."""
    program = (
        "import os, signal\nfrom slime_core.config.schema import Config\n"
        "from slime_core.plugins.isolated import IsolatedWorker\nworker = IsolatedWorker(Config())\nworker.load()\n"
        "print(worker.process.pid, flush=True)\nos.kill(worker.process.pid, signal.SIGSTOP)\n"  # it reads no end of file
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        process = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], 30)[0], "it still lives"
    finally:
        os.close(process)
