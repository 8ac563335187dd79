"""Our own rows of `slime doctor`: versions, processor, memory, disk, limits, clock, hub, and where runs are written.

Each row shows what is there and what is needed, in numbers where possible.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlparse

from slime_cli.preflight import WANTED_FILES, check_loopback, needed_files
from slime_core.errors import TrainerError, install_line
from slime_core.memory import available_memory
from slime_core.protocols import Check, CheckResult

DISTRIBUTION = "slime-rl"
PYTHON = ((3, 11), (3, 14))
NEEDED = {"torch": (2, 11), "transformers": (5, 17)}
GIB = 1 << 30


def own_checks() -> list[Check]:
    """In the order of `slime doctor`."""
    versions = [Check(name=name, run=lambda name=name: version(name)) for name in NEEDED]  # type: ignore[misc]
    return [
        Check(name="python", run=python),
        Check(name="installation", run=installation),
        *versions,
        Check(name="device", run=device),
        Check(name="processor", run=processor),
        Check(name="memory", run=memory),
        Check(name="disk", run=disk),
        Check(name="open files", run=open_files),
        Check(name="shared memory", run=shared_memory),
        Check(name="temporary files", run=temporary),
        Check(name="network", run=network),
        Check(name="home", run=home),
        Check(name="locale", run=locale),
        Check(name="clock", run=clock),
        Check(name="hub", run=hub),
        Check(name="runs", run=runs),
    ]


def python() -> CheckResult:
    """Python is in the supported range."""
    low, high = PYTHON
    version_here = ".".join(map(str, sys.version_info[:3]))
    if low <= sys.version_info[:2] < high:
        return CheckResult(status="ok", found=f"{version_here} at {sys.executable}")
    supported = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    return CheckResult(status="fail", found=f"{version_here}, supported is {supported}", fix=f"use Python {supported}")


def installation() -> CheckResult:
    """`slime_core` is ours: PyPI has strangers named slime and slime-core, and one ships a package `slime_core`."""
    import slime_core

    file = Path(slime_core.__file__ or "").resolve()
    strangers = [n for n in ("slime-core", "slime") if _installed(n) and _ships(n, "slime_core")]
    if strangers:
        return CheckResult(
            status="fail",
            found=f"distribution {strangers[0]} also ships a package slime_core; it is another project",
            fix=f"pip uninstall {strangers[0]} && pip install --force-reinstall --no-deps -e .   in a clone of slime",
        )
    if not _installed(DISTRIBUTION):
        return CheckResult(
            status="fail",
            found=f"slime_core is imported from {file.parent}, and no {DISTRIBUTION} is installed",
            fix="pip install -e .   in a clone of slime",
        )
    dist = metadata.distribution(DISTRIBUTION)
    home = _editable_folder(dist) or Path(str(dist.locate_file("")))
    if not file.is_relative_to(home.resolve()):
        return CheckResult(
            status="fail",
            found=f"slime_core is imported from {file.parent}, but {DISTRIBUTION} {dist.version} lies in {home}",
            fix="leave the folder that shadows it, or unset PYTHONPATH",
        )
    return CheckResult(status="ok", found=f"{DISTRIBUTION} {dist.version} in {home}")


def version(name: str) -> CheckResult:
    """A library is there and new enough; it is not imported."""
    low = NEEDED[name]
    oldest = ".".join(map(str, low))
    fix = install_line("fsdp")
    if util.find_spec(name) is None or not _installed(name):
        return CheckResult(status="fail", found=f"not installed; {oldest} or newer trains and samples", fix=fix)
    installed = metadata.version(name)
    numbers = tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in installed.split("+")[0].split(".")[:2]
    )
    if numbers < low:
        return CheckResult(status="fail", found=f"{installed}, needed is {oldest} or newer", fix=fix)
    return CheckResult(status="ok", found=installed)


def device() -> CheckResult:
    """What torch computes on."""
    if util.find_spec("torch") is None:
        return CheckResult(status="warn", found="unknown without torch", fix=install_line("fsdp"))
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return CheckResult(status="ok", found=f"{torch.cuda.device_count()} GPU(s): {', '.join(sorted(names))}")
    return CheckResult(status="ok", found="cpu (torch sees no GPU)")


def processor() -> CheckResult:
    """Cores, and what `dtype = "auto"` means on them."""
    from slime_core.clusters.machine import BF16_FLAGS, cpu_flags

    cores = len(os.sched_getaffinity(0))
    fast = sorted(cpu_flags() & BF16_FLAGS)
    dtype = f"bfloat16 has {', '.join(fast)}" if fast else 'no fast bfloat16, so dtype = "auto" is float32'
    if cores < 2:
        return CheckResult(
            status="warn",
            found=f"1 core, 2 or more are wanted; {dtype}",
            fix="give the machine two cores; one works, at half the speed",
        )
    return CheckResult(status="ok", found=f"{cores} cores; {dtype}")


def memory() -> CheckResult:
    """Physical memory, or the container's share of it, and what of it is free."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(file).read_text().strip() if Path(file).is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    message = f"{total / GIB:.1f} GiB, {min(total, available_memory()) / GIB:.1f} GiB free"
    if total < 2 * GIB:
        return CheckResult(
            status="fail",
            found=f"{message}; 2 GiB are needed, and 18 bytes a parameter more",
            fix="give the machine 2 GiB or more",
        )
    if total < 4 * GIB:
        return CheckResult(
            status="warn", found=message, fix="small models only: lower max_tokens_per_gpu, rollout_slots"
        )
    return CheckResult(status="ok", found=message)


def disk() -> CheckResult:
    """Free space where runs are written."""
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    if free < GIB:
        return CheckResult(status="fail", found=text, fix="free some space, or run elsewhere: --run-dir DIR")
    if free < 10 * GIB:
        return CheckResult(status="warn", found=text, fix="large models need more: --run-dir DIR on another disk")
    return CheckResult(status="ok", found=text)


def open_files() -> CheckResult:
    """The limits of open files: a run raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shown = [str(limit) if limit != unlimited else "none" for limit in (soft, hard)]
    text = f"limit {shown[0]} (hard {shown[1]}); a run needs {needed_files()} and requests {WANTED_FILES}"
    if hard != unlimited and hard < needed_files():
        return CheckResult(status="fail", found=text, fix=f"raise the hard limit: ulimit -Hn {WANTED_FILES}")
    if hard != unlimited and hard < WANTED_FILES:
        return CheckResult(status="warn", found=text, fix=f"ulimit -n {WANTED_FILES}")
    return CheckResult(status="ok", found=text)


def shared_memory() -> CheckResult:
    """/dev/shm: weights between processes are anonymous memory, so 64 MiB are as good as any."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return CheckResult(status="ok", found="no /dev/shm, and none is needed: weights cross in anonymous memory")
    size = shutil.disk_usage(folder).total
    return CheckResult(status="ok", found=f"{size >> 20} MiB in {folder}; none is needed")


def temporary() -> CheckResult:
    """Where traceback files go when there is no run; a run itself writes to its own directory only."""
    try:
        with tempfile.TemporaryFile():
            return CheckResult(status="ok", found=f"{tempfile.gettempdir()} can be written")
    except OSError as error:
        return CheckResult(
            status="warn", found=f"no folder for temporary files: {error.strerror}", fix="export TMPDIR=/a/folder"
        )


def network() -> CheckResult:
    """The loopback; IPv6 and the world outside are not needed."""
    has_v6 = Path("/proc/net/if_inet6").exists() and bool(Path("/proc/net/if_inet6").read_text().strip())
    family = "IPv4 and IPv6" if has_v6 else "IPv4; no IPv6, and none is needed"
    try:
        check_loopback()
    except TrainerError as error:
        return CheckResult(status="fail", found=f"{error.what}: {error.why}", fix=error.fix)
    return CheckResult(status="ok", found=f"loopback works ({family})")


def home() -> CheckResult:
    """The home folder: nothing of ours is written there, downloads of the hub are."""
    path = Path(os.environ.get("HF_HOME") or Path.home())
    if os.access(path, os.W_OK):
        return CheckResult(status="ok", found=f"{path} can be written")
    return CheckResult(status="ok", found=f"{path} is read-only; local model folders work, HF_HOME moves the cache")


def locale() -> CheckResult:
    """Texts are UTF-8 whatever the locale; a time zone only shows in times that are printed."""
    names = {name: os.environ[name] for name in ("LC_ALL", "LANG", "TZ") if os.environ.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in names.items()) or "LANG and TZ are not set"
    if sys.getfilesystemencoding().lower().replace("-", "") != "utf8":
        return CheckResult(
            status="warn",
            found=f"{shown}: file names are {sys.getfilesystemencoding()}",
            fix="export PYTHONUTF8=1 or LANG=C.UTF-8",
        )
    return CheckResult(status="ok", found=f"{shown}; files are UTF-8")


def clock() -> CheckResult:
    """Durations and deadlines are monotonic; the wall clock is printed and never compared."""
    info = time.get_clock_info("monotonic")
    if not info.monotonic or info.resolution > 0.01:
        return CheckResult(
            status="fail", found=f"no monotonic clock ({info.implementation})", fix="run on Linux 4.18 or newer"
        )
    return CheckResult(status="ok", found=f"{info.implementation}; wall clock {time.strftime('%Y-%m-%d %H:%M:%S %z')}")


def hub() -> CheckResult:
    """Whether names on the hub may be fetched; the network is not touched."""
    offline = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(n, "").lower() in _TRUE]
    if offline:
        return CheckResult(status="ok", found=f"offline ({offline[0]} is set): local folders and the cache only")
    return CheckResult(status="ok", found="online: a name such as org/model may be fetched")


_TRUE = ("1", "on", "yes", "true")


def runs() -> CheckResult:
    """`runs/` can be written."""
    folder = Path.cwd() / "runs"
    try:
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else Path.cwd()):
            return CheckResult(status="ok", found=f"{folder} can be written")
    except OSError as error:
        return CheckResult(
            status="fail",
            found=f"{folder} cannot be written: {error.strerror}",
            fix="go to a folder of your own, or use --run-dir DIR",
        )


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _ships(distribution: str, package: str) -> bool:
    files = metadata.distribution(distribution).files or []
    return any(file.parts[:1] == (package,) for file in files)


def _editable_folder(dist: metadata.Distribution) -> Path | None:
    text = dist.read_text("direct_url.json")
    data = json.loads(text) if text else {}
    if not data.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(data["url"]).path))
