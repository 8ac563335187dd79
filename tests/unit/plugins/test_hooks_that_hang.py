"""Hooks that take too long: ended where they can be, told with their stack, and never kept alive by."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from slime_core.config.schema import Config
from slime_core.errors import PluginError
from slime_core.plugins.boundary import Stuck

pytestmark = pytest.mark.unit

DROP = Config(rollout={"on_plugin_error": "drop"})
REWARD = "import threading, time\ntold = threading.Event()\n\n@slime_core.hookimpl\n{kind} slime_reward(group, ctx):\n{body}"


def loaded(load, body, kind="def"):
    plugins = load(geo=REWARD.format(kind=kind, body=textwrap.indent(textwrap.dedent(body).strip() + "\n", "    ")))
    return plugins, sys.modules["geo_plugin_module"]


def late(ask, plugins, seconds=0.3):
    with pytest.raises(PluginError) as caught:
        ask(plugins, "reward", plugins=("geo",), reward={"reward_timeout": seconds})
    error = caught.value
    assert error.code == "PLG60"
    assert "geo.slime_reward did not answer in 0.3 s for prompt 'main/3'" in error.what
    return error


@pytest.mark.parametrize("stands", ["told.wait(60)", "while not told.is_set():\n        pass"], ids=["waits", "loops"])
def test_a_sync_hook_that_cannot_be_ended_ends_the_run_whatever_the_policy(load, ask, stands):
    """It is told with its Python stack, and no setting makes the run go on beside it."""
    plugins, module = loaded(load, f"def inner():\n    {stands}\ninner()\nreturn [1.0, 1.0]")
    error = late(ask, plugins)
    module.told.set()
    assert isinstance(error, Stuck)
    assert plugins.ends_run(error, DROP)
    assert "cannot be ended" in error.why
    assert "in inner" in error.why, "the stack of the stuck thread"
    assert "own_process" in error.fix


def test_a_sync_hook_that_ends_soon_after_its_deadline_loses_its_group_alone(load, ask):
    """Nothing runs beside the run then."""
    plugins, _ = loaded(load, "time.sleep(0.6)\nreturn [1.0, 1.0]")
    error = late(ask, plugins)
    assert not plugins.ends_run(error, DROP)
    assert "geo_plugin_module.py" in error.where


def test_an_async_hook_that_waits_for_ever_is_cancelled_and_told_where_it_waited(load, ask):
    """With the stack of its coroutines."""
    body = "import asyncio\nasync def inner():\n    await asyncio.Event().wait()\nawait inner()"
    plugins, _ = loaded(load, body, kind="async def")
    error = late(ask, plugins)
    assert not plugins.ends_run(error, DROP)
    assert "in inner" in error.why
    assert "geo_plugin_module.py" in error.where


PROGRAM = """
import asyncio, sys
from pathlib import Path
from slime_core.plugins.boundary import HookImpl, HookThreads, Provider, call

provider = Provider(name="geo", origin="dist-geo==1.0", source="plugin", home=Path("<string>"))

def ask(fn, deadline):
    answer = HookImpl(provider=provider, hook="slime_reward", fn=fn, takes=frozenset())
    return asyncio.run(call(HookThreads(), answer, {}, about="prompt 'main/3'", deadline=deadline, key="k"))

def reads():
    print("ready", flush=True)
    return sys.stdin.readline().strip()

async def waits():
    print("ready", flush=True)
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
"""


@pytest.mark.parametrize("kind", ["reads", "waits"])
def test_a_process_that_was_stopped_finds_no_deadline_past(kind):
    """Time in which the process stood still does not count."""
    program = [sys.executable, "-c", PROGRAM + f"print(ask({kind}, 2.5).strip(), flush=True)\n"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(4)  # longer than the deadline, which is what is tested
        os.kill(child.pid, signal.SIGCONT)
        assert not select.select([child.stdout], [], [], 0.5)[0], "it still waits"
        out, _ = child.communicate("done\n", timeout=30)
    finally:
        child.kill()
        child.wait()
    assert out == "done\n"
    assert child.returncode == 0


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def test_a_stuck_thread_does_not_keep_the_process():
    """Hooks run on daemon threads."""
    source = PROGRAM + textwrap.dedent(
        """
        def stays():
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass

        try:
            ask(stays, 0.3)
        except Exception as error:
            print(error.code)
            sys.exit(error.exit_code)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == PluginError.exit_code, done.stderr
    assert done.stdout == "PLG60\n"
