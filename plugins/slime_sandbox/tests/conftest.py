"""A sandbox a module, at the best level that this machine has, and a candidate of source code in it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_sandbox import Limits, Policy, Sandbox

RUN_SOURCE = "sandbox_entries:run_source"
LIMITS = {
    "wall_seconds": 30.0,
    "memory_bytes": 256 << 20,
    "disk_bytes": 32 << 20,
    "files": 300,
    "output_bytes": 1 << 16,
}


@pytest.fixture(scope="module")
def sandbox():
    """``box`` and ``run(coroutine)``, in an event loop of the module; ``candidate(source, **limits)`` gives its outcome."""
    with asyncio.Runner() as runner:
        box = runner.run(Sandbox.open(Policy(), preload=("sandbox_entries",)))

        async def attempt(source, payload_limits, **more):
            return await box.run(RUN_SOURCE, source.encode(), Limits(**{**LIMITS, **payload_limits}), **more)

        def candidate(source, *, files=None, gpu=None, **limits):
            return runner.run(attempt(source, limits, files=files, gpu=gpu))

        yield SimpleNamespace(box=box, run=runner.run, candidate=candidate, attempt=attempt)
        runner.run(box.aclose())


@pytest.fixture
def processes():
    """How to find processes of this machine."""
    return SimpleNamespace(with_words=with_words, below=below)


def with_words(words):
    """Processes whose command line has these words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if words.encode() in line.replace(b"\0", b" "):
                found.append(int(folder.name))
    return found


def below(pid):
    """Children of a process, their children, and so on, in the order in which they were started."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found, new = [], [pid]
    while new:
        new = sorted(child for child, parent in parents.items() if parent in new)
        found += new
    return found
