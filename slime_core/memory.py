"""How much memory is free, and whether an exception says that it ran out: Python, numpy, torch on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
CONTEXT = 640 << 20
"""CUDA context, cuBLAS and cuDNN workspaces, Triton modules: what a process takes beside torch's allocator."""

LARGE = 1 << 30
"""Bytes from which a process gives freed memory back."""

NAMES = frozenset({"OutOfMemoryError"})  # of torch and torch.cuda, without importing them
SENTENCES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "can't start new thread",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ in NAMES:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, ImportError):
        return "failed to map segment" in str(error)
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in SENTENCES)


def first_line(error: BaseException) -> str:
    """What it said, without the trace that torch adds."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, in pieces that the next phase's tensors do not fit.

    It takes milliseconds, so a small process is left alone.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None and resident_memory() > LARGE:
        give_back(0)


def resident_memory() -> int:
    """Bytes of this process that lie in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def shortage(error: BaseException) -> TrainerError:
    """TRN132 of an exception that says that memory ran out; limits of this process are named where it has some."""
    limits = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
    limits_set = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    bounded = [f"{name} {size >> 20} MiB" for name, size in limits_set.items() if size != resource.RLIM_INFINITY]
    return TrainerError(
        f"memory, or room for a thread, ran out: {first_line(error)}",
        code="TRN132",
        where="limits of this process" if bounded else "this machine",
        why=f"it may have: {', '.join(bounded)}" if bounded else "",
        fix="ulimit -v unlimited; ulimit -d unlimited" if bounded else "take a smaller model, or free memory",
    )


def available_memory() -> int:
    """Bytes that this process may still allocate: the machine's free memory, or the rest of the container's limit."""
    free = _meminfo().get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, now = _number(most), _number(used)
        if limit is not None:
            free = min(free, max(0, limit - (now or 0)))
    return free


def machine_memory() -> int:
    """Bytes of this machine's main memory, or the container's limit: the same on every run."""
    total = _meminfo().get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limits = (_number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min(total, *(limit for limit in limits if limit is not None))


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


def limit_gpu(device: torch.device, gib: float) -> None:
    """Let this process take so many GiB of a GPU at most, its CUDA context included; 0 is all.

    Raises:
        ConfigError: CFG03 less than the context takes.
    """
    import torch

    if device.type != "cuda" or not gib:
        return
    room, total = gib * GIB - CONTEXT, torch.cuda.get_device_properties(device).total_memory
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_limit = {gib:g} leaves nothing for tensors",
            code="CFG03",
            where="cluster.gpu_memory_limit",
            why=f"a process takes {CONTEXT >> 20} MiB of a GPU before its first tensor",
            fix="raise it, or leave it out",
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), device)


def gpu_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may fill with tensors."""
    import torch

    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def free_gpu_memory(device: torch.device | None = None) -> int:
    """Bytes of a GPU that are free, within this process's limit; those that torch has cached are not counted."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    reserved = torch.cuda.memory_reserved(device)
    return min(int(torch.cuda.mem_get_info(device)[0]), max(0, gpu_memory(device) - reserved))
