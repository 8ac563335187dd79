"""How much memory is free, and whether an exception says that it ran out: Python, numpy, torch on a CPU or a GPU."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NAMES = frozenset({"OutOfMemoryError"})  # of torch and torch.cuda, without importing them
SENTENCES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ in NAMES:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in SENTENCES)


def first_line(error: BaseException) -> str:
    """What it said, without the trace that torch adds."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has free, or what is left of the container's share."""
    free = _meminfo().get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, now = _number(most), _number(used)
        if limit is not None:
            free = min(free, max(0, limit - (now or 0)))
    return free


def _meminfo() -> dict[str, int]:
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3}
    except (OSError, ValueError):
        return {}


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
        return int(text) if text.isdigit() else None
    except OSError:
        return None
