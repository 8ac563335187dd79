"""Fixtures for all tests, of the core, plugins and examples: the command line, recipes, plugins, small model folders.

And what the suite does as a whole: tests that start SGLang's server (marker `sglang`) come first and run in one
worker; tests that share what a module's fixture made run in one worker; a test whose event loop ends with an open
connection fails; what cannot be proven on this machine is named at the end, a line "not proven: TEST (why)" each.
"""

import asyncio
import compileall
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import ADDRESS as ZYGOTE, Zygote, start_zygote
from scripts import forking, python

ROOT = Path(__file__).parent

for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    with suppress(ValueError):  # not the main thread
        # ignored under nohup or in the background: children would inherit it
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, default)

MEMORY = Path("/dev/shm")
GPU = Path("/dev/nvidiactl")  # the models of tests are large where there is one
if not GPU.exists() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    # folders of tests: what is synced to a disk on every write waits for it some ten thousand times in the suite
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

UNPROVEN = "not proven"
SERVED = ROOT / "plugins" / "slime_sglang" / "tests" / "served"


ENVIRONMENTS = {"sglang": "SGLang", "environments": "verifiers"}  # by marker, what the environment beside ours has


@functools.cache
def find_python(marker):
    """The interpreter of the environment that tests with ``marker`` need, and why there is none where it is empty."""
    python = os.environ.get(f"SLIME_{marker.upper()}_PYTHON", "") or str(ROOT / f".venv-{marker}" / "bin" / "python")
    package = ENVIRONMENTS[marker]
    try:
        command = [python, "-c", f"from importlib.metadata import version; print(version('{package.lower()}'))"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return "", f"no {package}: {error.strerror}: {python}; `make {marker}` installs it"
    if process.returncode:
        return "", f"no {package} in the environment of {python}; `make {marker}` installs it"
    return python, ""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """Compile the packages and start the zygote once for all workers of a whole run."""
    if not hasattr(session.config, "workerinput"):
        os.environ.pop(ZYGOTE, None)  # a session within a test of another may have other code
    if session.config.getoption("numprocesses", None):
        for folder in (ROOT / "slime_core", ROOT / "cli", *sorted(ROOT.glob("plugins/*/src"))):
            compileall.compile_dir(folder, quiet=2)
        start_zygote()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among modules and tests, neither while they come nor later: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Start with the tests that wait longest for something outside, end with those that fill any gap."""
    for item in items:
        if SERVED in item.path.parents:
            item.add_marker(pytest.mark.sglang)
    items.sort(key=length)


def length(item):
    """How long the tests may be that a worker gets with this one: 0 is the longest."""
    if item.get_closest_marker("sglang"):
        return 0
    if shares(item.path):  # the marks of single tests may not part a module
        return 1
    return 2 + bool(item.get_closest_marker("unit"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Which tests stay together, in the order of their collection: one at a time goes to a worker that is free.

    xdist's own loadgroup writes groups where this pytest does not read them, so all tests would spread.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return together(nodeid)

        def mark_test_complete(self, node, item_index, duration=0):
            """Forget what is done: every look at what is pending would count it."""
            super().mark_test_complete(node, item_index, duration)
            scope = together(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    config.option.loadscopereorder = False
    return Together(config, log)


def together(nodeid):
    """What shares a worker: all tests of the server, those of a module that makes something once, a test alone."""
    file = ROOT / nodeid.partition("::")[0]
    if SERVED in file.parents:
        return "sglang"
    return str(file) if shares(file) else nodeid


@functools.cache
def shares(file):
    """Whether a module has a fixture that is made once; another worker would make it again."""
    return file.suffix == ".py" and 'scope="module"' in file.read_text()


def pytest_runtest_setup(item):
    """Leave out what this machine cannot prove; it is named at the end."""
    for marker in ENVIRONMENTS:
        if item.get_closest_marker(marker) and not find_python(marker)[0]:
            pytest.skip(f"{UNPROVEN}: {find_python(marker)[1]}")


UNCLOSED = []  # connections that were open when their event loop closed


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes the connections open at its end, and closes them lest another test meets them."""

    def __init__(self):
        super().__init__()
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "no test")

    def close(self):
        if not self.is_running() and not self.is_closed():
            for transport in [each for each in self._transports.values() if each._sock is not None]:
                ends = " -> ".join(str(transport.get_extra_info(name)) for name in ("sockname", "peername"))
                UNCLOSED.append(f"{transport!r}, {ends}, of {transport.get_protocol()!r}, in a loop of {self.test}")
                transport._call_connection_lost(None)
        super().close()


class WatchedLoops(asyncio.DefaultEventLoopPolicy):
    """The policy of the test process: every new event loop is watched."""

    def new_event_loop(self):
        return WatchedLoop()


def pytest_configure():
    asyncio.set_event_loop_policy(WatchedLoops())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Blame the test that left connections open: Python warns of them much later, in whichever test collects them."""
    try:
        return (yield)
    finally:
        connections, UNCLOSED[:] = [*UNCLOSED], []
        if connections:
            lines = ["an event loop was closed before these connections were:", *connections]
            pytest.fail("\n  ".join(lines), pytrace=False)


def pytest_terminal_summary(terminalreporter):
    """Name what was left out."""
    reports = [report for report in terminalreporter.stats.get("skipped", ()) if UNPROVEN in str(report.longrepr)]
    if reports:
        terminalreporter.section("not proven here", sep="-")
    for report in reports:
        reason = report.longrepr[2].partition(f"{UNPROVEN}: ")[2]
        terminalreporter.line(f"{UNPROVEN}: {report.nodeid.partition('@')[0]} ({reason})")


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium of the system's package, through playwright; tests that need it are left out without it.

    Until the module's end an event loop runs in this thread, so the module's tests start none of their own.
    """
    executable = find_chromium()
    if not executable:
        pytest.skip(f"{UNPROVEN}: no Chromium; apt-get install chromium, or SLIME_CHROMIUM=/path/to/chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])  # as root in CI
        yield browser
        browser.close()


def find_chromium():
    """The browser that tests of pages drive, or None."""
    return os.environ.get("SLIME_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def sglang_python():
    """The interpreter of SGLang's environment; tests with the marker `sglang` are left out where there is none."""
    return find_python("sglang")[0]


@pytest.fixture(scope="session")
def environments_python():
    """The interpreter that has verifiers and OpenEnv; tests with the marker `environments` are left out without it."""
    return find_python("environments")[0]


@pytest.fixture(scope="session")
def zygote():
    """What forks `slime ARGS`: it has imported torch, so that a run begins at once."""
    with Zygote() as process:
        yield process


@pytest.fixture(scope="session")
def torch_python():
    """A command that runs a script, or ``-c TEXT``, where torch is imported already; see `scripts.py`."""
    name = f"slime-torch-{os.getpid()}"
    with forking(name, ["torch.distributed", "safetensors.torch", "slime_core.weights.shared_memory"]):
        yield python(name)


@pytest.fixture
def forked_slime(zygote, tmp_path, tmp_path_factory):
    """Run `slime ARGS` in a process of its own, forked from one that has imported torch; see ``Zygote.slime``."""

    def run(*args, cwd=tmp_path, path=(), timeout=120, **env):
        return zygote.slime(tmp_path_factory.mktemp("said"), *args, cwd=cwd, path=path, hung=timeout, **env)

    return run


@pytest.fixture
def slime(tmp_path):
    """Run `slime ARGS` as a user does, in a folder of its own; the answer has returncode, stdout and stderr."""

    def run(*args, cwd=tmp_path, path=(), timeout=120, **env):
        search = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        return subprocess.run(
            [sys.executable, "-m", "slime_cli.main", *map(str, args)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Call `slime ARGS` in an empty folder; the answer has code, out and err."""
    from slime_cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args):
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        caught = capsys.readouterr()
        return Done(code, caught.out, caught.err)

    return call


@pytest.fixture
def install_plugin(tmp_path, monkeypatch):
    """Write a plugin and its distribution's metadata, as pip would, and put them on the path; answers the folder."""
    site = tmp_path / "site"

    def install(name, source, *, distribution="", version="1.0"):
        distribution = distribution or f"dist-{name}"
        module = f"{name}_plugin_module"
        site.mkdir(exist_ok=True)
        (site / f"{module}.py").write_text(source)
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[slime.plugins]\n{name} = {module}\n")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        return site

    yield install
    for module in [m for m in sys.modules if m.endswith("_plugin_module")]:
        del sys.modules[module]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write recipe.toml (text or bytes) in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text="", name="recipe.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def refused():
    """The error that a recipe and flags end in."""
    from slime_core.config.load import read
    from slime_core.errors import ConfigError

    def load(path, *flags, **options):
        with pytest.raises(ConfigError) as caught:
            read(path, flags, **options)
        return caught.value

    return load


REWARD = '''
import os
import signal

async def reward(args, sample, **kwargs):
    """A number that hardly two responses share; the sample that HALT names asks the process to stop."""
    name, _, number = os.environ.get("HALT", "").partition(" ")
    if sample.id == name:
        os.kill(os.getpid(), getattr(signal, number or "SIGTERM"))
    return sum(place * ord(char) for place, char in enumerate(sample.response, 1)) % 101 / 101
'''


@dataclass
class Own:
    """A user's own model, rows and reward, in one folder."""

    path: Path

    @property
    def flags(self):
        """A run of four short steps, a checkpoint every second one."""
        return (
            *("--hf-checkpoint", self.path / "model", "--prompt-data", self.path / "my.jsonl"),
            *("--input-key", "question", "--label-key", "answer", "--custom-rm-path", f"{self.path}/judge.py:reward"),
            *("--rollout-shuffle", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "4"),
            *("--rollout-max-response-len", "6", "--lr", "1e-2", "--cpu-threads", "1", "--rollout-slots", "8"),
            *("--save-interval", "2", "--dtype", "float32"),
        )


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model folder of a few thousand parameters."""
    from slime_core.testing import tiny_model

    path = tmp_path_factory.mktemp("model") / "model"
    tiny_model(path)
    return path


@pytest.fixture(scope="session")
def make_own(tmp_path_factory, model):
    """Files to train on, in a new folder."""

    def make():
        path = tmp_path_factory.mktemp("own")
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(5)]
        (path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "judge.py").write_text(REWARD)
        (path / "model").symlink_to(model)
        return Own(path)

    return make


@pytest.fixture
def own(make_own):
    """Files to train on, which a test may change."""
    return make_own()


SMALL = """
name = "small"
seed = 5

[rollout]
hf_checkpoint = "model"
rollout_batch_size = 2
n_samples_per_prompt = 4
rollout_max_response_len = 6

[data]
prompt_data = "rows.jsonl"
input_key = "q"
label_key = "a"

[reward]
custom_rm_path = "digits.py:reward"

[cluster]
cpu_threads = 1

[train]
lr = 2e-3
dtype = "float32"

[eval]
eval_prompt_data = ["held", "rows.jsonl@[0:3]"]
skip_eval_before_train = true

[report]
save_interval = 2
save_keep = 5

[[stage]]
name = "warmup"
loss_type = "sft_loss"
num_rollout = 1
n_samples_per_prompt = 1

[[stage]]
name = "grpo"
num_rollout = 3
kl_loss_coef = 0.01
num_steps_per_rollout = 2
"""
DIGITS = """
def reward(args, sample, **kw):
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
"""


@dataclass
class Small:
    """A recipe of four steps in two stages, checkpoints at 2 and 4, a finished run of it and its dump."""

    folder: Path
    run: Path
    dump: Path

    def go(self, *args):
        """`slime ARGS` in this process; the answer is the exit code."""
        from slime_cli.main import main

        return main([str(arg) for arg in args])

    def again(self, name, *flags):
        """Another run of the recipe; the answer is its folder."""
        assert self.go("run", self.folder / "small.toml", "--run-dir", self.folder / name, *flags) == 0
        return self.folder / name


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small finished run, that no test may change."""
    from slime_core.testing import tiny_model

    folder = tmp_path_factory.mktemp("small")
    tiny_model(folder / "model", hidden=32, tied=True)
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits.py").write_text(DIGITS)
    (folder / "small.toml").write_text(SMALL)
    finished = Small(folder, folder / "run", folder / "dump")
    finished.again("run", "--save-debug-rollout-data", finished.dump)
    return finished
