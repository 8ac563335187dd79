"""`slime run` with SGLang's servers, as a process: what it leaves, and what a kill of any of its processes does.

Recipes are rm_math's arithmetic. Trainers are FSDP's, Megatron-core's on two CPU ranks, whose steps on GPUs are
`tests/gpu/test_megatron_with_sglang_on_gpu.py`, and those of a Ray cluster. That a killed server answers its requests in
flight once is proven for the engine in `test_kill_and_recover.py`; here for the ledger.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from raw_server import START_TIMEOUT, RawServer, title
from served_recipe import recipe

from durability.audit import Audit, audit
from slime_core.ledger.ledger import SqliteLedger
from slime_core.rollout.dump import evaluation_path, read_dump
from slime_sglang import held_ports as ports

pytestmark = pytest.mark.system

TOKEN = "SLIME_SGLANG_TOKEN"
ON_CPU = Path(__file__).parents[3] / "slime_megatron" / "tests" / "megatron_on_cpu"
RAY = ("--cluster", "ray", "--ray-address", "local")
EVALUATED = """[eval]
eval_async = true
eval_interval = 2
eval_tasks = [{ name = "arithmetic_heldout" }]
"""
TWO_ENGINES = ("--no-colocate", "--rollout-num-engines", "2", "--rollout-router", "builtin", "--max-staleness", "1")
TABLES: dict[str, Any] = {
    "name": "served",
    "seed": 3,
    "cluster": {"device": "cpu", "cpu_threads": 1},
    "data": {"rollout_shuffle": True},
    "rollout": {
        "rollout_max_response_len": 48,
        "rollout_max_context_len": 128,
        "rollout_health_check_interval": 0.5,
    },
    "train": {"dtype": "float32"},
    "report": {"save_interval": 1},
    "sglang": {"mem_fraction_static": 0.2, "max_total_tokens": 20000, "env": {"OMP_NUM_THREADS": "1"}},
    "plugin.rm_math": {"digits": 1},
}
STAGES = {
    "warmup": {"num_rollout": 4, "rollout_batch_size": 32, "lr": 5e-3},
    # a gradient also where no answer was right: entropy
    "grpo": {"num_rollout": 6, "rollout_batch_size": 4, "lr": 1e-3, "entropy_coef": 0.01},
}
WARMUP, STEPS = 4, 10  # the last versions of both stages
SAMPLES = 4 * 32 + 6 * 4 * 8
SERVED = range(WARMUP + 1, STEPS + 1)  # versions that trained on what the server made
SHARED = "/dev/shm/"
LOOK = 0.25  # seconds between looks at what processes have mapped
MEGATRON_WARMUP, MEGATRON_STEPS = 12, 15
MEGATRON_STAGES = {
    "warmup": {"num_rollout": MEGATRON_WARMUP, "rollout_batch_size": 64, "lr": 5e-3, "lr_warmup_iters": 4},
    "grpo": {
        "num_rollout": MEGATRON_STEPS - MEGATRON_WARMUP,
        "rollout_batch_size": 4,
        "lr": 1e-3,
        "entropy_coef": 0.01,
    },
}
TAUGHT = 0.25  # mean reward of what the server makes after the warm-up; a fresh model's is 0


@dataclass(slots=True)
class Ended:
    """How the command ended."""

    code: int
    left: dict[int, str]  # processes that outlived it
    shared: set[str]  # files of theirs in shared memory that outlived them
    output: str


@dataclass(slots=True)
class Work:
    """A folder with the recipe; runs go to ``run`` in it, temporary files of all their processes to ``tmp``."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, stages: dict[str, dict[str, Any]], tables: dict[str, Any]) -> Work:
        """Write the recipe."""
        work = cls(folder)
        work.temporary.mkdir(parents=True)
        (folder / "recipe.toml").write_text(recipe(**stages, tables=tables))
        return work

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def start(self, *more: str, **environment: str) -> Driver:
        """Start the run or go on with it, in a session of its own."""
        words = ["run", "recipe.toml", "--run-dir", "run", "--resume", "auto", *more]
        base = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slime_cli.main", *words],
                cwd=self.folder,
                env={**base, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Driver(self, process)

    def output(self) -> str:
        """What all runs have said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, those of steps."""
        file = self.run / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if row["kind"] == "step"]


@dataclass(slots=True)
class Driver:
    """A run under way; ``servers`` are the leaders of its servers' sessions that were ever seen, ``shared`` the files
    of shared memory that any of its processes had."""

    work: Work
    process: subprocess.Popen[bytes]
    servers: frozenset[int] = frozenset()
    shared: frozenset[str] = frozenset()
    looked: float = 0.0

    def until(self, true: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until ``true()``; fails where the run ends before, or does not come there."""
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"the run ended, and not: {what}\n{self.work.output()[-6000:]}"
            assert time.monotonic() < deadline, f"{seconds} s, and not: {what}\n{self.work.output()[-6000:]}"
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Remember the sessions of its servers and their files, now and then."""
        if time.monotonic() - self.looked < LOOK:
            return
        self.looked = time.monotonic()
        self.servers |= {pid for pid in children(self.process.pid) if session_of(pid) == pid}
        self.shared |= {file for pid in self.alive() for file in shared_files(pid)}

    def alive(self) -> list[int]:
        """Processes of the driver's session and of its servers'."""
        return [pid for session in {self.process.pid, *self.servers} for pid in ports.members(session)]

    def scheduler(self) -> int:
        """The process of its server that computes, 0 where there is none."""
        for session in self.servers:
            for pid in ports.members(session):
                if title(pid).startswith("sglang::scheduler"):
                    return pid
        return 0

    def wait(self, seconds: float) -> Ended:
        """Wait for its end, and a moment for the processes that end with it."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"{seconds} s, and no end\n{self.work.output()[-6000:]}"
            self.look()
            time.sleep(0.02)
        left: dict[int, str] = {}
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            left = {pid: title(pid) for pid in self.alive()}
            if not left:
                break
            time.sleep(0.02)
        shared = {file for file in self.shared if Path(file).exists()}
        return Ended(self.process.returncode, left, shared, self.work.output())

    def close(self) -> None:
        """Kill it, where a test failed before its end; its servers end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


def in_order(work: Work) -> Audit:
    """A run that came to its end: every sample in one state, every step in the journal, every figure a number."""
    found = audit(work.run)
    assert found.wrong == []
    assert sorted(found.steps) == list(range(1, STEPS + 1))
    trained = [sample for samples in found.steps.values() for sample in samples]
    assert len(trained) == len(set(trained)) == SAMPLES
    steps = {line["version"]: line["metrics"] for line in work.lines()}
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert [version for version, metrics in steps.items() if not math.isfinite(metrics["loss"])] == []
    assert [version for version, metrics in steps.items() if not metrics["grad_norm"] > 0] == []
    return found


def served_samples(work: Work, versions: range) -> dict[int, set[int]]:
    """Version of a step -> versions of the weights that made its tokens."""

    async def read() -> dict[int, set[int]]:
        ledger = SqliteLedger(work.run)
        try:
            made = {}
            for version in versions:
                samples = await ledger.samples(await ledger.composition(version))
                made[version] = {one for sample in samples for one in sample.weight_versions if one >= 0}
            return made
        finally:
            await ledger.close()

    return asyncio.run(read())


def children(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return found


def session_of(pid: int) -> int:
    """The session of a process, 0 where it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def shared_files(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped; in folders there lie the tests' own files."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = {line[line.index(SHARED) :] for line in lines if SHARED in line and not line.endswith("(deleted)")}
    return {path for path in found if "/" not in path.removeprefix(SHARED)}


def is_settled(server: RawServer) -> bool:
    """Whether a server answers a request at once: nobody left it paused."""
    return len(server.generate((13, 14), 1)["output_ids"]) == 1


@pytest.fixture
def work(tmp_path: Path, served_model: Path, sglang_python: str) -> Work:
    """The recipe of a run, in a folder of the test."""
    rollout, sglang = (
        {**TABLES["rollout"], "hf_checkpoint": served_model},
        {**TABLES["sglang"], "python": sglang_python},
    )
    return Work.make(tmp_path / "work", STAGES, {**TABLES, "rollout": rollout, "sglang": sglang})


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Runs that were started; none outlives its test."""
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.close()


def test_a_run_through_a_server_that_runs_already(server: RawServer, work: Work, drivers: list[Driver]) -> None:
    token = server.server.address.token
    drivers.append(
        work.start(
            "--rollout-external-engine-addrs", server.server.address.url, "--check-weights", "all", **{TOKEN: token}
        )
    )
    ended = drivers[-1].wait(150)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert "Unclosed" not in ended.output, ended.output[-2000:]
    in_order(work)
    # On-policy: the step that makes version v trains on what version v - 1 sampled.
    assert served_samples(work, SERVED) == {version: {version - 1} for version in SERVED}
    for line in work.lines():
        canary = {name: value for name, value in line["metrics"].items() if name.startswith("canary/")}
        assert canary["canary/tensors"] == 18, canary
        assert canary["canary/logprob_diff_mean"] < canary["canary/band"]
    assert is_settled(server)
    assert server.ask("/model_info")["weight_version"].endswith(f".{STEPS}")
    assert list(work.temporary.iterdir()) == []
    assert token not in ended.output
    assert [path for path in work.run.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_whose_driver_and_then_whose_server_is_killed(work: Work, drivers: list[Driver]) -> None:
    """Nothing lost, nothing doubled, nothing left: the servers end with a driver that is killed, and come back in one
    that goes on."""
    drivers.append(work.start())
    first = drivers[-1]
    first.until(lambda: len(work.lines()) > WARMUP, "a step of the second stage", START_TIMEOUT + 120)
    first.look()
    assert first.scheduler()
    first.process.kill()
    ended = first.wait(30)
    assert ended.code == -signal.SIGKILL
    assert (ended.left, ended.shared) == ({}, set()), "a server outlived the driver"
    assert len(work.lines()) < STEPS

    drivers.append(work.start())
    second = drivers[-1]
    done = len(work.lines())
    second.until(lambda: len(work.lines()) > done, "a step of the resumed run", START_TIMEOUT + 120)
    os.kill(second.scheduler(), signal.SIGKILL)
    ended = second.wait(START_TIMEOUT + 120)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert "Unclosed" not in ended.output, ended.output[-2000:]
    in_order(work)
    made = served_samples(work, SERVED)
    assert all(versions == {version - 1} for version, versions in made.items()), made
    assert "restart 1 of 3" in ended.output
    assert list(work.temporary.iterdir()) == []


@pytest.fixture
def evaluating(work: Work) -> Work:
    """A run that evaluates beside training."""
    text = (work.folder / "recipe.toml").read_text()
    assert "[eval]\n" in text
    text = text.replace("[eval]\n", EVALUATED).replace("[plugin.rm_math]\n", "[plugin.rm_math]\nheldout_rows = 12\n")
    (work.folder / "recipe.toml").write_text(text)
    return work


@pytest.mark.nightly
def test_one_evaluates_with_the_weights_that_it_has_while_another_takes_updates(
    evaluating: Work, drivers: list[Driver]
) -> None:
    work = evaluating
    drivers.append(work.start(*TWO_ENGINES, "--save-debug-rollout-data", "dumps", "--check-weights", "all"))
    ended = drivers[-1].wait(400)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    in_order(work)
    rows = map(json.loads, (work.run / "metrics.jsonl").read_text().splitlines())
    versions = [row["version"] for row in rows if row["kind"] == "eval"]
    assert sorted(set(versions)) == list(range(2, STEPS + 1, 2))
    for version in (2, *range(WARMUP + 2, STEPS, 2)):  # those beside training
        groups = read_dump(evaluation_path(work.folder / "dumps", "arithmetic_heldout", version))
        made = {v for group in groups for sample in group.samples for v in sample.weight_versions}
        assert made == {version}


@pytest.fixture
def megatron_work(tmp_path: Path, served_model: Path) -> Work:
    """Tensor parallel: what is published is gathered from both ranks."""
    tables = {
        **TABLES,
        "plugins": ["rm_math", "models"],
        "cluster": {"cpu_threads": 1, "actor_num_gpus_per_node": 2},  # device = cpu is refused with this backend
        "rollout": {**TABLES["rollout"], "rollout_max_response_len": 4, "hf_checkpoint": served_model},
        "train": {"dtype": "float32", "train_backend": "megatron"},
        "megatron": {"tensor_model_parallel_size": 2},
        "report": {"save_interval": 0},
        "plugin.rm_math": {"digits": 1, "carry_lost": 0.0},
        "sglang": {},
    }
    return Work.make(tmp_path / "work", MEGATRON_STAGES, tables)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # it may wait for the server too
def test_what_megatron_learns_is_what_sglang_serves(
    server: RawServer, megatron_work: Work, drivers: list[Driver]
) -> None:
    work = megatron_work
    path = os.pathsep.join([str(ON_CPU), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    token = server.server.address.token
    address = ("--rollout-external-engine-addrs", server.server.address.url)
    drivers.append(work.start(*address, **{TOKEN: token, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}))
    ended = drivers[-1].wait(280)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert audit(work.run).wrong == []
    steps = {line["version"]: line["metrics"] for line in work.lines()}
    assert sorted(steps) == list(range(1, MEGATRON_STEPS + 1))
    for version, metrics in steps.items():
        assert metrics["grad_norm"] > 0, version
        # every tensor of both ranks is there, and the server computes of them what Megatron does
        assert metrics["canary/tensors"] > 0, version
        assert metrics["canary/logprob_diff_mean"] < 1e-4, version
    served = [steps[version] for version in range(MEGATRON_WARMUP + 1, MEGATRON_STEPS + 1)]
    assert fmean(metrics["reward/mean"] for metrics in served) > TAUGHT, [m["reward/mean"] for m in served]
    assert (work.run / "final" / "model.safetensors").is_file()
    assert is_settled(server)


@pytest.fixture
def temporary_files() -> Iterator[Path]:
    """Where processes of a run put theirs; Ray's sockets lie there, and their names are short."""
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    folder = Path(tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ranks_on_a_cluster_send_weights_to_a_server_that_runs_already(
    server: RawServer, work: Work, drivers: list[Driver], temporary_files: Path
) -> None:
    """Every step's samples are of the version before, and every tensor is the rank's, on another's server."""
    address = server.server.address
    flags = ("--rollout-external-engine-addrs", address.url, "--check-weights", "all")
    drivers.append(work.start(*RAY, *flags, SLIME_SGLANG_TOKEN=address.token, TMPDIR=str(temporary_files)))
    ended = drivers[-1].wait(200)
    assert ended.code == 0, ended.output[-6000:]
    assert "1 trainer rank(s), 0 engine(s)" in ended.output
    in_order(work)
    assert served_samples(work, SERVED) == {version: {version - 1} for version in SERVED}
    for line in work.lines():
        assert line["metrics"]["canary/tensors"] == 18
        assert line["metrics"]["canary/logprob_diff_mean"] < line["metrics"]["canary/band"]
    assert address.token not in ended.output


@pytest.mark.nightly  # three starts of the server
@pytest.mark.timeout(1800)
def test_a_run_whose_server_and_then_whose_host_is_killed_comes_to_its_end_by_itself(
    work: Work, drivers: list[Driver], temporary_files: Path
) -> None:
    """The server comes back on its host; without the host the run goes on from its checkpoint, and nothing is lost."""
    drivers.append(work.start(*RAY, "--max-restarts", "1", TMPDIR=str(temporary_files)))
    run = drivers[-1]
    run.until(lambda: len(work.lines()) > WARMUP, "a step of the second stage", START_TIMEOUT + 120)
    seen = below(run.process.pid)
    (scheduler,) = [pid for pid in seen if title(pid).startswith("sglang::scheduler")]
    os.kill(scheduler, signal.SIGKILL)
    run.until(lambda: "serves again" in work.output(), "the server's second generation", START_TIMEOUT)
    seen |= below(run.process.pid)
    (host,) = [pid for pid in seen if title(pid).startswith("ray::Host")]
    os.kill(host, signal.SIGKILL)
    ended = run.wait(2 * START_TIMEOUT)
    assert ended.code == 0, ended.output[-6000:]
    assert "restart 1 of 3" in ended.output
    assert "was lost with its host" in ended.output
    in_order(work)
    assert [title(pid) for pid in seen if title(pid)] == []
    assert list(temporary_files.glob("slime-server-*")) == []


def below(pid: int) -> set[int]:
    """Processes that a process has started, and theirs."""
    found = set(children(pid))
    return found.union(*map(below, found))
