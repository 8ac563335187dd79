"""`slime run` with SGLang's servers, as a process: a recipe of rm_math, what the run left behind, what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_server import ENVIRONMENT, RawServer

from slime_core.engines.sglang import ports

RECIPE = """
name = "served"
seed = 3
plugins = ["rm_math"]

[cluster]
device = "cpu"
cpu_threads = 1

[data]
rollout_shuffle = true

[rollout]
hf_checkpoint = {model}
rollout_engine = "sglang"
rollout_max_response_len = 48
rollout_max_context_len = 128
rollout_health_check_interval = 0.5

[train]
dtype = "float32"

[eval]
skip_eval_before_train = true

[report]
save_interval = 1

[sglang]
python = {python}
mem_fraction_static = 0.2
max_total_tokens = 20000
env = {environment}

[plugin.rm_math]
digits = 2
operations = ["+"]
ones_first = true
padded = true

[[stage]]
name = "warmup"
tasks = [{{ name = "arithmetic_pupil" }}]
loss_type = "sft_loss"
num_rollout = 2
rollout_batch_size = 16
n_samples_per_prompt = 1
lr = 2e-3

[[stage]]
name = "grpo"
tasks = [{{ name = "arithmetic" }}]
num_rollout = 4
rollout_batch_size = 4
n_samples_per_prompt = 4
lr = 1e-3
"""
STEPS = 6  # of both stages


def toml(value: Any) -> str:
    """A string, or a table of strings, as TOML has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {json.dumps(text)}" for name, text in value.items()) + " }"
    return json.dumps(str(value))


@dataclass(slots=True)
class Ended:
    """How the command ended."""

    code: int
    left: dict[int, str]  # processes that outlived it
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
        text = RECIPE.format(model=toml(model), python=toml(python), environment=toml(ENVIRONMENT))
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
        base = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
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
    """A run under way; ``servers`` are the leaders of its servers' sessions that were ever seen."""

    work: Work
    process: subprocess.Popen[bytes]
    servers: frozenset[int] = frozenset()

    def until(self, true: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until ``true()``; fails where the run ends before, or does not come there."""
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"the run ended, and not: {what}\n{self.work.output()[-6000:]}"
            assert time.monotonic() < deadline, f"{seconds} s, and not: {what}\n{self.work.output()[-6000:]}"
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Remember the sessions of its servers."""
        self.servers |= {pid for pid in children(self.process.pid) if os.getsid(pid) == pid}

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
            left = {pid: title(pid) for session in {self.process.pid, *self.servers} for pid in ports.members(session)}
            if not left:
                break
            time.sleep(0.02)
        return Ended(self.process.returncode, left, self.work.output())

    def close(self) -> None:
        """Kill it, where a test failed before its end; its servers end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


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


def shared_memory() -> set[str]:
    """Files of shared memory on this machine."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def is_settled(server: RawServer) -> bool:
    """Whether a server answers a request at once: nobody left it paused."""
    return len(server.generate((13, 14), 1)["output_ids"]) == 1
