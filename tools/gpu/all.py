#!/usr/bin/env python3
"""Everything that only GPUs can tell, side by side on as many GPUs as there are, the most wanted first.

    python3 tools/gpu/all.py check                seconds: whether all packages are there, at their places
    python3 tools/gpu/all.py list                 the parts, with GPUs and seconds
    python3 tools/gpu/all.py run [PART ...]       all of them, or those named in their order, left to run by themselves
    python3 tools/gpu/all.py together PART ...    these at once, on GPUs they share: tests that measure no time
    python3 tools/gpu/all.py run PART ... -- together PART ... -- ...     one group after another
    python3 tools/gpu/all.py wait SECONDS         until all have ended, or so long; then what has ended so far

A part is a step of a script beside this one, and begins when its number of GPUs is
free; one that needs more than there are is named as not run. Of four GPUs, two are kept for parts of two while there
are any. Logs go to $GPU_LOGS (default /tmp/gpu-logs); ``wait`` puts them into $OUT as logs.tgz, beside figures.txt
with rows for docs/benchmarks.md. Before ``run``, once a load: ``. .gpu/install.sh``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).resolve().parent
LOGS = Path(os.environ.get("GPU_LOGS", "/tmp/gpu-logs"))
SITE = Path(os.environ.get("GPU_SITE", str(Path.home() / ".gpu-site")))
SHOWN = 25  # last lines of each log
OURS = "slime-rl slime-convert slime-kernelbench slime-models slime-rm-math"
WANTED = f"{OURS} torch transformers pydantic orjson aiohttp xxhash pytest pytest-timeout"


class Part(NamedTuple):
    """One step of a script, and what it takes."""

    script: str
    step: str
    gpus: int
    seconds: int  # at most


PARTS = [
    Part("sglang", "nccl-30b", 4, 500),
    Part("sglang", "ahead-four", 4, 600),
    Part("megatron", "ray-four", 4, 560),
    Part("sglang", "rollout", 1, 480),
    Part("real_model", "compare", 1, 600),
    *(Part("real_model", f"learn-{seed}", 1, 590) for seed in range(3)),
    *(Part("engine_vs_sglang", shape, 1, 400) for shape in ("4B", "0.6B", "135M")),
    Part("megatron", "step", 1, 290),
    Part("megatron", "learn-two", 2, 470),
    Part("sglang", "sync", 1, 300),
    Part("megatron", "long", 1, 400),
    Part("sglang", "nccl", 2, 330),
    Part("sglang", "nccl-30b-two", 2, 400),
    Part("megatron", "learn-nccl", 2, 330),
    Part("megatron", "functional", 2, 600),
    Part("megatron", "ray-two", 2, 560),
    Part("megatron", "learn", 1, 330),
    Part("megatron", "full", 1, 130),
    Part("megatron", "gaps", 1, 450),
    Part("megatron", "gaps-keep", 1, 450),
    Part("sglang", "functional", 1, 560),
    Part("sglang", "runs", 1, 500),
    Part("sglang", "vision", 1, 600),
    Part("sglang", "fp8", 1, 580),
    Part("sglang", "replay", 1, 580),
    Part("megatron", "moe", 1, 340),
    Part("sglang", "repeats", 1, 330),
    Part("sglang", "sync-graphs", 1, 190),
    Part("megatron", "gaps-fsdp", 1, 450),
    Part("megatron", "gaps-fsdp-keep", 1, 450),
    Part("sglang", "deterministic", 1, 330),
    Part("megatron", "more", 1, 240),
    Part("megatron", "experts", 1, 150),
    Part("sglang", "ahead", 2, 600),
    Part("sglang", "pair", 2, 580),
    Part("megatron", "core", 2, 300),
    Part("megatron", "convert", 0, 400),
    Part("kernels", "judge", 1, 700),
    Part("kernels", "bench", 1, 350),
    Part("kernels", "run", 1, 900),
    Part("kernels", "examples", 1, 600),
]


def environment() -> dict[str, str]:
    """Of the parts: where a load's packages lie, and one folder for the benchmarks' models."""
    env = {**os.environ, "OUT": str(LOGS), "LINES_SHOWN": "3", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if (SITE / "main").is_dir():
        env["SGLANG_SITE"] = str(SITE / "sglang")
        env["PYTHONPATH"] = f"{SITE / 'main'}:{os.environ.get('PYTHONPATH', '')}"
    if Path("/dev/shm").is_dir():
        env.setdefault("SLIME_BENCH_MODELS", "/dev/shm/slime-models")
    return env


def check() -> int:
    """Say what is there; 1 where something is missing."""
    missing = []
    for name in [*WANTED.split(), "megatron-core"]:
        try:
            print(name, version(name), end="; ")
        except PackageNotFoundError:
            missing.append(name)
    plugins = {point.name for point in entry_points(group="slime.plugins")}
    missing += [f"plugin {name}" for name in ("kernelbench", "models", "rm_math", "sandbox") if name not in plugins]
    if not os.environ.get("SLIME_SGLANG_PYTHON") and not (SITE / "sglang" / "sglang").is_dir():
        missing.append("sglang in $SGLANG_SITE")
    if not missing:
        for module in ("megatron.core", "slime_megatron.worker", "slime_models.presets"):
            if importlib.util.find_spec(module) is None:
                missing.append(module)
    print("\nmissing: " + ", ".join(missing) if missing else "\nall there")
    return int(bool(missing))


def queue(parts: list[Part]) -> None:
    """Run parts in their order, as GPUs come free."""
    import torch

    count = torch.cuda.device_count()
    for part in [part for part in parts if part.gpus > count]:
        tell(part, begun=0.0, code=None, why=f"needs {part.gpus} GPUs, there are {count}")
    waiting, free = [part for part in parts if part.gpus <= count], set(range(count))
    running: dict[Part, tuple[subprocess.Popen[bytes], set[int], float]] = {}
    while waiting or running:
        for part in list(waiting):
            kept = set(range(count - 2, count)) if count >= 4 and any(other.gpus > 1 for other in waiting) else set()
            room = sorted(free - kept if part.gpus == 1 else free, reverse=part.gpus > 1)
            if part.gpus <= len(room):
                taken = set(room[: part.gpus])
                free -= taken
                waiting.remove(part)
                running[part] = (start(part, sorted(taken)), taken, time.time())
            elif count < 4:  # what needs fewer does not go before it for ever
                break
        for part, (process, taken, begun) in list(running.items()):
            if process.poll() is not None:
                tell(part, begun=begun, code=process.returncode, why="")
                free |= taken
                del running[part]
        time.sleep(0.2)


def together(parts: list[Part]) -> None:
    """Run parts all at once, dealt over the GPUs in turn."""
    import torch

    count, begun, taken = torch.cuda.device_count(), time.time(), 0
    running = {}
    for part in parts:
        running[part] = start(part, [(taken + i) % count for i in range(min(part.gpus, count))])
        taken += part.gpus
    while running:
        for part in [part for part, process in running.items() if process.poll() is not None]:
            tell(part, begun=begun, code=running.pop(part).returncode, why="")
        time.sleep(0.2)


def start(part: Part, gpus: list[int]) -> subprocess.Popen[bytes]:
    """Begin a part on these GPUs."""
    command = [str(SCRIPTS / f"{part.script}.sh"), part.step]
    env = {**environment(), "GPU": ",".join(map(str, gpus))}
    with (LOGS / f"{part.script}-{part.step}.out").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def tell(part: Part, *, begun: float, code: int | None, why: str) -> None:
    """A line about a part that has ended."""
    row = {"part": f"{part.script} {part.step}", "exit": code, "seconds": round(time.time() - begun) if begun else 0}
    with (LOGS / "parts.jsonl").open("a") as lines:
        lines.write(json.dumps({**row, "why": why}) + "\n")


def wait(seconds: float) -> None:
    """Wait; then put logs, figures and a summary where they come back."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (LOGS / "ended").exists():
        time.sleep(1)
    out = Path(os.environ.get("OUT", "/tmp/out"))
    out.mkdir(parents=True, exist_ok=True)
    logs = sorted(LOGS.glob("*.log"))
    rows = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.startswith("| ")]
    (out / "figures.txt").write_text("\n".join(rows) + "\n")
    with tarfile.open(out / "logs.tgz", "w:gz") as archive:
        archive.add(LOGS, arcname="logs")
    for path in sorted(LOGS.glob("*.out")):
        print(f"-- {path.stem}\n{path.read_text(errors='replace')[-1500:]}")
    parts = LOGS / "parts.jsonl"
    print(parts.read_text() if parts.exists() else "nothing has ended yet")
    print("ended" if (LOGS / "ended").exists() else "still running")


def groups(words: Sequence[str]) -> list[list[str]]:
    """``run A B -- together C`` as [run, A, B], [together, C]."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def main(what: str, *names: str) -> int:
    """See the module."""
    if what == "check":
        return check()
    if what == "list":
        print("\n".join(f"{part.script} {part.step}: {part.gpus} GPUs, {part.seconds} s" for part in PARTS))
    elif what in ("run", "together"):
        known = {f"{part.script}-{part.step}" for part in PARTS}
        if any(not group or group[0] not in ("run", "together") for group in groups([what, *names])):
            print("after -- comes run or together, and parts")
            return 2
        if unknown := [name for _, *parts in groups([what, *names]) for name in parts if name not in known]:
            print(f"no part {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
            return 2
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / "ended").unlink(missing_ok=True)
        with (LOGS / "queue.txt").open("w") as log:
            command = [sys.executable, __file__, "chain", what, *names]
            subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    elif what == "chain":
        every = {f"{part.script}-{part.step}": part for part in PARTS}
        for kind, *parts in groups(names):
            (queue if kind == "run" else together)([every[name] for name in parts or every])
        (LOGS / "ended").touch()
    elif what == "wait":
        wait(float(names[0]))
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["help"])))
