"""`slime run` with SGLang's servers, as a process: a recipe of rm_math, what the run left behind, what became of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_server import RawServer
from served_recipe import recipe

from durability.audit import Audit, audit
from slime_core.ledger.ledger import SqliteLedger
from slime_sglang import held_ports as ports

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
    def make(cls, folder: Path, model: Path, python: str) -> Work:
        """Write the recipe."""
        work = cls(folder)
        work.temporary.mkdir(parents=True)
        rollout, sglang = {**TABLES["rollout"], "hf_checkpoint": model}, {**TABLES["sglang"], "python": python}
        text = recipe(**STAGES, tables={**TABLES, "rollout": rollout, "sglang": sglang})
        (folder / "recipe.toml").write_text(text)
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


def title(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


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
