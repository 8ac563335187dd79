"""Hooks that take too long: ended where they can be, told with their stack, and never kept alive by."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from slime_core.config.schema import Config
from slime_core.errors import PluginError
from slime_core.notices import notices_to
from slime_core.plugins import calls
from slime_core.plugins.boundary import Stuck
from slime_core.plugins.calls import Watch

pytestmark = pytest.mark.unit

DROP = Config(rollout={"on_plugin_error": "drop"})
REWARD = "import threading, time\ntold = threading.Event()\n\n@slime_core.hookimpl\n{kind} slime_reward(group, ctx):\n{body}"


def loaded(load, body, kind="def"):
    plugins = load(geo=REWARD.format(kind=kind, body=textwrap.indent(textwrap.dedent(body).strip() + "\n", "    ")))
    return plugins, sys.modules["geo_plugin_module"]


@pytest.fixture
def watch(monkeypatch):
    """The watch of this process, quicker."""
    quick = Watch(lag=0.5, grace=60.0)
    for module in ("calls", "running", "boundary", "guard"):
        monkeypatch.setattr(f"slime_core.plugins.{module}.WATCH", quick)
    return quick


@pytest.fixture
def said():
    lines = []
    with notices_to(lines.append):
        yield lines


def late(ask, plugins, seconds=0.3):
    with pytest.raises(PluginError) as caught:
        ask(plugins, "reward", plugins=("geo",), reward={"reward_timeout": seconds})
    error = caught.value
    assert error.code == "PLG60"
    assert "geo.slime_reward did not answer in 0.3 s for prompt 'main/3'" in error.what
    return error


def test_60_a_sync_hook_that_loops_is_ended_and_only_its_group_is_lost(load, ask):
    """Case 60: Python code that runs can be interrupted, and the stack is of the moment before."""
    plugins, module = loaded(load, "try:\n    while True:\n        pass\nfinally:\n    told.set()")
    error = late(ask, plugins)
    assert module.told.is_set(), "the loop has ended"
    assert not plugins.ends_run(error, DROP)
    assert "geo_plugin_module.py" in error.why
    assert "in slime_reward" in error.why


def test_60_a_sync_hook_that_cannot_be_ended_ends_the_run_whatever_the_policy(load, ask):
    """Case 60: it is dumped, with its Python stack, and no setting makes the run go on beside it."""
    plugins, module = loaded(load, "def inner():\n    told.wait(60)\ninner()\nreturn [1.0, 1.0]")
    error = late(ask, plugins)
    module.told.set()
    assert isinstance(error, Stuck)
    assert plugins.ends_run(error, DROP)
    assert "cannot be ended" in error.why
    assert "in inner" in error.why, "the stack of the stuck thread"
    assert "own_process" in error.fix


def test_60_an_async_hook_that_waits_for_ever_is_cancelled_and_told_where_it_waited(load, ask):
    """Case 60: with the stack of its coroutines."""
    body = "import asyncio\nasync def inner():\n    await asyncio.Event().wait()\nawait inner()"
    plugins, _ = loaded(load, body, kind="async def")
    error = late(ask, plugins)
    assert not plugins.ends_run(error, DROP)
    assert "in inner" in error.why
    assert "geo_plugin_module.py" in error.where


@pytest.mark.parametrize("hook", ["slime_reward", "slime_sampling"])
def test_60_a_hook_that_loops_on_the_main_thread_is_ended_by_the_watch(load, group, ctx, watch, hook):
    """Case 60: where asyncio cannot run, because the hook holds its loop."""
    kind, takes = ("async def", "group, ctx") if hook == "slime_reward" else ("def", "prompt, ctx")
    plugins = load(geo=f"@slime_core.hookimpl\n{kind} {hook}({takes}):\n    while True:\n        pass\n")
    config = Config(reward={"reward_timeout": 1.0}, rollout={"generate_timeout": 1.0})
    used = type(ctx)(**{**{name: getattr(ctx, name) for name in ctx.__slots__}, "config": config})

    def call():
        return plugins.sampling(group.prompt, used) if kind == "def" else asyncio.run(plugins.reward(group, used))

    with pytest.raises(PluginError) as caught:
        call()
    assert caught.value.code == "PLG60"
    assert "geo_plugin_module.py" in caught.value.where
    assert watch.in_progress() == []


@pytest.mark.parametrize("task", [False, True], ids=["in the hook", "in a task that it made"])
def test_68_a_blocking_call_in_an_async_hook_is_named_with_its_line(load, ask, watch, said, task):
    """Case 68: a notice with plugin, hook and line; not an error."""
    blocks = "async def blocks():\n    told.wait(60)\n"
    body = blocks + ("import asyncio\nawait asyncio.create_task(blocks())" if task else "await blocks()")
    plugins, module = loaded(load, body + "\nreturn [1.0, 1.0]", kind="async def")
    with notices_to(lambda text: module.told.set()):
        found = ask(plugins, "reward", plugins=("geo",))
    assert [reward.value for reward in found] == [1.0, 1.0]
    assert len(said) == 1
    assert said[0].startswith("geo.slime_reward")
    assert "holds the event loop" in said[0]
    assert "geo_plugin_module.py:8 in blocks" in said[0]


@pytest.mark.parametrize("busy", ["thread", "waits"])
def test_68_work_on_other_threads_and_hooks_that_wait_are_no_lag(load, ask, watch, said, busy):
    """Case 68: no false alarm while the loop runs."""
    until = "while watch.clock < start + 1.5:\n    "
    body = {"thread": until + "sum(range(1000))", "waits": until + "await asyncio.sleep(0)"}[busy]
    kind = "def" if busy == "thread" else "async def"
    plugins, module = loaded(load, f"import asyncio\nstart = watch.clock\n{body}\nreturn [1.0, 1.0]", kind=kind)
    module.watch = watch
    ask(plugins, "reward", plugins=("geo",))
    assert said == []


PROGRAM = """
import asyncio, sys, threading
from pathlib import Path
from slime_core.notices import notices_to
from slime_core.plugins import calls
from slime_core.plugins.boundary import HookThreads, call
from slime_core.plugins.provider import Answer, Provider

calls.WATCH.lag = 1.0
printed = notices_to(lambda text: print("notice", text, flush=True))
printed.__enter__()
provider = Provider(name="geo", origin="dist-geo==1.0", source="plugin", home=Path("<string>"))

def ask(fn, deadline):
    answer = Answer(provider=provider, hook="slime_reward", fn=fn, takes=frozenset())
    return asyncio.run(call(HookThreads(), answer, {}, about="prompt 'main/3'", deadline=deadline, key="k"))

def reads():
    print("ready", flush=True)
    return sys.stdin.readline().strip()

async def waits():
    print("ready", flush=True)
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
"""


@pytest.mark.parametrize("kind", ["reads", "waits"])
def test_125_a_process_that_was_stopped_finds_no_deadline_past_and_no_lag(kind):
    """Cases 60, 68 and 125: time in which the process stood still does not count."""
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


def test_60_a_hook_on_the_main_thread_that_nothing_ends_ends_the_process_with_its_error():
    """Case 60: dumped, and the process exits with the code of plugins."""
    source = PROGRAM + textwrap.dedent(
        """
        from slime_core.plugins.boundary import call_now
        calls.WATCH.grace = 1.0

        def stays():
            while True:
                try:
                    threading.Event().wait(100)
                except BaseException:
                    pass

        call_now(Answer(provider=provider, hook="slime_batch", fn=stays, takes=frozenset()), {},
                 about="step 3", limit=0.5, key="rollout.generate_timeout")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == PluginError.exit_code
    assert "error PLG60  geo.slime_batch did not answer in 0.5 s for step 3" in done.stderr
    assert "in stays" in done.stderr
    assert "rollout.generate_timeout=1" in done.stderr
    assert "notice error PLG60" in done.stdout, "the run's log has it too"


def test_60_a_stuck_thread_does_not_keep_the_process():
    """Case 60: hooks run on daemon threads."""
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


def test_the_watch_ends_when_nothing_is_left_and_comes_back(load, ask, watch):
    """Case 60: no thread is left behind."""
    plugins, _ = loaded(load, "return [1.0, 1.0]")
    for _ in range(2):
        ask(plugins, "reward", plugins=("geo",))
        thread = watch._thread
        assert thread in threading.enumerate()
        thread.join(30)
        assert watch._thread is None
    assert calls.LAG == 5.0
