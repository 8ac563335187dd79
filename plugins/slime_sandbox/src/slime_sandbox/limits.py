"""The kernel's resource limits of one candidate, and how much address space the fork server brought along."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Any

LOCKED_BYTES = 8 << 20


def lower_limits(limits: dict[str, Any], memory: bool, others: int) -> None:
    """Lower this process's limits for good.

    ``memory``: address space too, which CUDA does not survive. ``others`` are processes and threads of the same user
    that the kernel counts with this one's.
    """
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + others,
        resource.RLIMIT_MEMLOCK: LOCKED_BYTES,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    if memory:
        values[resource.RLIMIT_AS] = address_space() + limits["memory_bytes"]
    for which, value in values.items():
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        soft = value
        if which == resource.RLIMIT_CPU:
            value += 1  # SIGXCPU first, which says why; SIGKILL for who does not hear it
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (soft, value))


def address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def tasks_of(user: int) -> int:
    """Processes and threads that a user has."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count
