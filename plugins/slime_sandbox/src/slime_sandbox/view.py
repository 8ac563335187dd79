"""What a candidate may read: Python, its libraries, the modules of the fork server, and the system's programs.

Made by the driver, which knows its own paths; the same list becomes the jail's root folder (level strong) or
Landlock's rules (level medium).
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from slime_core.errors import SandboxError

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
CONFIGURATION = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "ssl/openssl.cnf",
)
"""Of /etc: what programs and the dynamic linker read; nothing about users, hosts or keys."""
PARTS = ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg", "nvvm")
"""Of a Python's prefix: a prefix may be a home folder."""
HARDWARE = ("/sys/devices/system/cpu", "/sys/devices/system/node")
GPU_PLACES = ("/sys", "/usr/local/nvidia", "/usr/local/cuda", "/etc/vulkan", "/etc/OpenCL", "/run/nvidia-persistenced")
GPU_FACTS = "/proc/driver/nvidia/gpus"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GPU_DEVICES = ("/dev/nvidia*", "/dev/nvidia-caps", "/dev/kfd", "/dev/dri")


def readable(modules: Sequence[str], more: Iterable[str], gpu: bool) -> list[str]:
    """Existing files and folders, sorted, none inside another. Raises `SandboxError` where a module is missing."""
    paths = [*SYSTEM, *(f"/etc/{name}" for name in CONFIGURATION), *HARDWARE, *(GPU_PLACES if gpu else ())]
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        paths += [os.path.join(prefix, part) for part in PARTS]
    paths += [place for path in sys.path if (place := _library(path))]
    for root in dict.fromkeys(name.partition(".")[0] for name in ("slime_core", "slime_sandbox", *modules)):
        paths += _home(root)
    paths += [os.path.abspath(path) for path in more]
    if gpu:
        paths += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    return _outermost(path for path in paths if os.path.exists(path))


def devices(gpu: str | None) -> list[str]:
    """Device files for a candidate with that GPU, a UUID, or none; of all GPUs where the driver tells no UUIDs."""
    if not gpu:
        return list(DEVICES)
    paths = [path for pattern in GPU_DEVICES for path in sorted(glob.glob(pattern))]
    minors = {_fact(text, "GPU UUID"): _fact(text, "Device Minor") for text in _facts()}
    if gpu in minors:
        others = {f"/dev/nvidia{minor}" for uuid, minor in minors.items() if uuid != gpu}
        paths = [path for path in paths if path not in others]
    return [*DEVICES, *paths]


def _facts() -> list[str]:
    return [path.read_text() for path in sorted(Path(GPU_FACTS).glob("*/information"))]


def _fact(text: str, name: str) -> str:
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _library(path: str) -> str:
    """An entry of ``sys.path`` into which distributions were installed, not somebody's project; else nothing."""
    folder = Path(path)
    installed = folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))
    return path if path and installed else ""


def _home(root: str) -> list[str]:
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise SandboxError(
            f"the sandbox's fork server is to import {root!r}, and there is no such module",
            code="SBX00",
            fix=f"pip install {root}",
        )
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.has_location and spec.origin else []


def _outermost(paths: Iterable[str]) -> list[str]:
    roots: list[str] = []
    for path in sorted(os.path.normpath(path) for path in paths):
        if not roots or not (path == roots[-1] or path.startswith(roots[-1] + os.sep)):
            roots.append(path)
    return roots
