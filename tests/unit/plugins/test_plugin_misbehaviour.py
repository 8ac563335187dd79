"""Plugin code that changes what is not its own, harms the process, answers by chance, or keeps what cannot be saved."""

import asyncio
import locale
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hooked import TAKES, WATCHED, ask, batch, hook

from slime_core.config.schema import Config
from slime_core.errors import PluginError

pytestmark = pytest.mark.unit


ANSWERS = {
    "slime_reward": "return [1.0, 1.0]",
    "slime_generate": "return group",
    "slime_sampling": "return ctx.sampling",
}


def changing(load, group, ctx, name, change, **sections):
    body = f"{change}; {ANSWERS.get(name, 'return None')}"
    plugins = load(geo=hook(name, TAKES.get(name, "group, ctx"), body))
    return ask(plugins, name, group, ctx, **sections)


EASY = [
    ("slime_reward", "group.samples[1].tokens.append(5)", "tokens of sample 1 of group 'main/3'"),
    ("slime_reward", "group.samples[1].tokens = [1, 2]", "tokens of sample 1 of group 'main/3'"),
    ("slime_reward", "group.samples[0].response_length = 1", "response_length of sample 0"),
    ("slime_reward", "group.samples[0].rollout_log_probs = [-9.0, -9.0]", "rollout_log_probs of sample 0"),
    ("slime_reward", "group.samples[0].id = 'x'", "id of sample 0"),
    ("slime_reward", "group.samples.reverse()", "id of sample 0"),
    ("slime_reward", "group.samples.pop()", "samples of group 'main/3'"),
    ("slime_reward", "group.rollouts.clear()", "rollouts of group 'main/3'"),
    ("slime_reward", "group.prompt.tokens.clear()", "tokens of prompt 'main/3'"),
    ("slime_filter", "group.samples[0].reward = 5.0", "reward of sample 0"),
    ("slime_filter", "group.samples[0].tokens.pop()", "tokens of sample 0"),
    ("slime_sample_done", "sample.weight_versions.clear()", "weight_versions of the sample"),
    ("slime_sampling", "prompt.tokens.append(1)", "tokens of prompt 'main/3'"),
    ("slime_generate", "group.prompt.tokens.append(1)", "tokens of prompt 'main/3'"),
    ("slime_batch", "batch.sample_ids.append('x')", "sample_ids of the batch"),
    ("slime_batch", "batch.tokens = batch.tokens[:-1]", "tokens of the batch"),
    ("slime_step_done", "report.metrics['loss'] = 0.0", "metrics of the report"),
    ("slime_step_done", "report.metrics.clear()", "metrics of the report"),
]


@pytest.mark.parametrize(("name", "change", "told"), EASY)
def test_a_hook_that_changes_what_it_may_only_read_is_named_with_field_and_id(
    load, generated, ctx, name, change, told
):
    """Where hooks are watched."""
    with pytest.raises(PluginError) as caught:
        changing(load, generated, ctx, name, change, **WATCHED)
    error = caught.value
    assert error.code == "PLG61"
    assert f"geo.{name} changed {told}" in error.what
    assert "geo (dist-geo==1.0)" in error.where


HIDDEN = [
    ("slime_reward", "group.samples[1].tokens[4] = 9", "tokens of sample 1"),
    ("slime_reward", "group.samples[1].rollout_log_probs[0] = -9.0", "rollout_log_probs of sample 1"),
    ("slime_filter", "group.samples[0].tokens[0] = 1", "tokens of sample 0"),
    ("slime_sample_done", "sample.weight_versions[0] = 7", "weight_versions of the sample"),
    ("slime_batch", "batch.tokens[0] = 5", "tokens of the batch"),
    ("slime_batch", "batch.sample_ids.reverse()", "sample_ids of the batch"),
]


@pytest.mark.parametrize(("name", "change", "told"), HIDDEN)
def test_a_change_inside_a_list_is_found_by_its_hash(load, generated, ctx, name, change, told):
    """Where hooks are watched."""
    with pytest.raises(PluginError, match="changed") as caught:
        changing(load, generated, ctx, name, change, **WATCHED)
    assert caught.value.code == "PLG61"
    assert told in caught.value.what


@pytest.mark.parametrize("watched", [{}, WATCHED], ids=["unwatched", "watched"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "slime_reward",
            "group.samples[0].metadata['why'] = 'x'; group.samples[0].tokens = list(group.samples[0].tokens)",
        ),
        ("slime_filter", "group.samples[0].remove_sample = True"),
        ("slime_sample_done", "sample.train_metadata['a'] = 1"),
        ("slime_generate", "group.samples[0].append_response([1], [-0.1])"),
        ("slime_batch", "batch.columns['advantages'] *= 2; batch.loss_mask[0] = 0"),
        ("slime_step_done", "dict(report.metrics, more=1)"),
    ],
)
def test_annotations_columns_and_equal_copies_are_no_change(load, generated, ctx, name, change, watched):
    """Annotations, columns, and copies with the same content."""
    changing(load, generated, ctx, name, change, **watched)


def test_an_estimator_may_not_change_the_batch_that_it_scores(load):
    """Estimators are given arrays."""
    source = (
        "from slime_core import Estimator\nimport numpy as np\n"
        "def fn(batch, train):\n    batch.reward[0] = 9.0\n    return {'advantages': np.ones(2, np.float32)}\n"
        + hook("slime_advantage", "", "return [Estimator(name='mine', fn=fn)]")
    )
    plugins = load({**WATCHED, "train": {"advantage_estimator": "mine"}}, geo=source)
    with pytest.raises(PluginError, match="changed reward of the batch") as caught:
        plugins.advantage(batch(), {}, Config(train={"advantage_estimator": "mine"}).train)
    assert caught.value.code == "PLG61"


HARMS = [
    ("os.chdir('/')", "changed the working folder from {cwd} to /"),
    ("locale.setlocale(locale.LC_ALL, OTHER)", "changed the locale"),
    ("resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN[0] - 1, OPEN[1]))", "changed RLIMIT_NOFILE"),
]
SETUP = """
import os, locale, resource
OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)
OTHER = "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C"
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """What hooks may change of this process is put back."""
    monkeypatch.chdir(tmp_path)
    before, limit = locale.setlocale(locale.LC_ALL), resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    locale.setlocale(locale.LC_ALL, before)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("kind", ["def", "async def"], ids=["sync", "async"])
@pytest.mark.parametrize(("harm", "told"), HARMS, ids=["chdir", "locale", "limit"])
def test_a_change_of_what_belongs_to_the_process_is_told_where_hooks_are_watched(
    load, generated, ctx, said, process, harm, told, kind
):
    """The working folder, the locale and limits."""
    told = told.format(cwd=os.getcwd())
    plugins = load(geo=SETUP + hook("slime_reward", "group", f"{harm}; return [1.0, 1.0]", kind))
    ask(plugins, "slime_reward", generated, ctx, **WATCHED)
    assert len(said) == 1
    assert said[0].startswith(f"geo.slime_reward {told}")
    assert "prompt 'main/3'" in said[0]


@pytest.mark.parametrize("name", ["slime_sampling", "slime_generate"])
def test_a_change_of_signal_handlers_is_told_where_hooks_are_watched(load, generated, ctx, said, process, name):
    """A handler can be set on the main thread, where these hooks run."""
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {ANSWERS[name]}"
    kind = "async def" if name == "slime_generate" else "def"
    plugins = load(geo="import signal\n" + hook(name, TAKES.get(name, "group, ctx"), body, kind))
    ask(plugins, name, generated, ctx, **WATCHED)
    assert said == [line for line in said if line.startswith(f"geo.{name} changed the handler of SIGTERM")]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        ("random.random()", "Python's random"),
        ("numpy.random.seed(1)", "numpy.random"),
        ("numpy.random.rand()", "numpy.random"),
        ("torch.rand(1)", "torch's generator"),
    ],
)
def test_draws_from_global_generators_are_told_where_hooks_are_watched(load, generated, ctx, said, draw, told):
    """They are not put back, or every call of the hook would draw the same."""
    source = "import random, numpy, torch\n" + hook("slime_reward", "group", f"{draw}; return [1.0, 1.0]")
    plugins = load(geo=source)
    ask(plugins, "slime_reward", generated, ctx)
    assert said == []
    np.random.seed(77)
    before = random.getstate()
    ask(plugins, "slime_reward", generated, ctx, **WATCHED)
    assert len(said) == 1
    assert f"geo.slime_reward drew from {told}" in said[0]
    assert "seed_of" in said[0]
    assert (random.getstate() == before) == (told != "Python's random")


@pytest.mark.parametrize("kind", ["def", "async def"], ids=["sync", "async"])
def test_a_hook_that_only_looks_says_nothing(load, generated, ctx, said, kind):
    """No false alarm."""
    plugins = load(geo=hook("slime_reward", "group", "return [1.0, 1.0]", kind))
    ask(plugins, "slime_reward", generated, ctx, **WATCHED)
    assert said == []


def in_process(source, timeout=60):
    """Run a program of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(program, env=env, capture_output=True, text=True, timeout=timeout, check=False)


MADE = """
    import asyncio, os, signal, sys, threading, time
    from pathlib import Path
    from slime_core.errors import PluginError
    from slime_core.plugins.boundary import HookImpl, HookThreads, Provider, call, call_now

    def answer(fn, hook="slime_reward"):
        provider = Provider(name="geo", origin="dist-geo==1.0", source="plugin", home=Path("<string>"))
        return HookImpl(provider=provider, hook=hook, fn=fn, takes=frozenset())

    def ask(fn, deadline=0.3):
        return asyncio.run(call(HookThreads(), answer(fn), {}, about="prompt 'main/3'", deadline=deadline, key="k"))
"""


@pytest.mark.parametrize("kind", ["async", "now"])
def test_ctrl_c_of_a_person_is_not_taken_for_the_plugins(kind):
    """It is no error of the hook that runs just then."""
    call = {"async": "ask(later, 30)", "now": "call_now(answer(spins), {}, about='x')"}[kind]
    done = in_process(
        MADE
        + f"""
    def spins():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    async def later():
        spins()

    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted")
    """
    )
    assert done.stdout == "interrupted\n", done.stderr


def test_a_keyboard_interrupt_on_a_hooks_thread_is_the_plugins(load, generated, ctx):
    """Ctrl-C of a person interrupts the main thread alone."""
    plugins = load(geo=hook("slime_reward", "group, ctx", "raise KeyboardInterrupt"))
    with pytest.raises(PluginError) as caught:
        ask(plugins, "slime_reward", generated, ctx)
    assert caught.value.code == "PLG62"


def test_a_child_that_a_hook_forks_may_end_itself():
    """A run refuses os._exit to its own process alone."""
    done = in_process(
        MADE
        + """
    from slime_cli.failure import exit_refused

    def forks():
        child = os.fork()
        if not child:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with exit_refused():
        print(ask(forks))
        try:
            ask(lambda: os._exit(0))
        except PluginError as error:
            print(error.code)
    sys.stdout.flush()
    os._exit(3)
    """
    )
    assert (done.stdout, done.returncode) == ("7\nPLG62\n", 3), done.stderr


FULL = """
from dataclasses import dataclass

@dataclass(slots=True)  # which is not hashable
class Full:
    def begin(self, span): raise OSError("no space")
    def end(self, span): raise OSError("no space")

@slime_core.hookimpl
def slime_spans(ctx): return [Full()]
"""


def test_an_observer_of_spans_that_fails_is_told_once_and_ends_nothing(load, ctx, said):
    plugins = load(full=FULL)

    async def run():
        async with plugins.running(ctx):
            for _ in range(2):
                with plugins.span("train"):
                    pass

    asyncio.run(run())
    assert [line.partition(";")[0] for line in said] == ["Full failed"]
