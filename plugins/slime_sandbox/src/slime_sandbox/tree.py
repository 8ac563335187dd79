"""The root folder that candidates live in: an empty tmpfs with what they may read bound into it, read-only.

/usr /lib ... Python, libraries   bound, read-only, no set-user-id
/etc                              made up, but for the dynamic linker's files
/dev                              null zero full random urandom, and GPUs where the policy says so
/proc                             of the jail's own PID namespace
/sandbox                          a candidate's own tmpfs: folder, HOME, caches; /tmp and /dev/shm lead there
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import suppress

from slime_sandbox import kernel
from slime_sandbox.view import DEVICES, GPU_DEVICES

FOLDER = "/sandbox"
OLD = "/.old"
NEW = "/.new"
ETC = {
    "passwd": "candidate:x:{user}:{group}:candidate:/sandbox:/bin/sh\n",
    "group": "candidate:x:{group}:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hosts": "",
}
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": f"{FOLDER}/shm",
    "/tmp": f"{FOLDER}/tmp",
    "/var/tmp": f"{FOLDER}/tmp",
}
SUBFOLDERS = ("tmp", "shm", "triton", "cache")


def build(readable: Iterable[str], gpu: bool, user: int, group: int) -> None:
    """Make the tree and change into it, in a mount namespace of this process's own. Raises `OSError`."""
    nodes = [path for pattern in GPU_DEVICES if gpu for path in sorted(glob.glob(pattern))]
    real = {path: os.path.realpath(path) for path in [*readable, *DEVICES, *nodes]}
    links = {path: os.readlink(path) for path in real if os.path.islink(path) and os.path.dirname(path) == "/"}
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    base = _base()
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=16m")
    os.mkdir(base + OLD)
    os.mkdir(base + NEW)
    kernel.pivot_root(base, base + OLD)
    os.chdir("/")
    kernel.mount("tmpfs", NEW, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=16m")
    for path, target in links.items():
        os.symlink(target, NEW + path)
    places = {place: source for path, source in real.items() for place in (path, source) if place not in links}
    for place in sorted(places):  # a folder before what lies in it, or the rest of it would be missing
        _bind(places[place], place, sealed=not place.startswith("/dev/"))
    _furnish(user, group)
    os.chdir(NEW)
    kernel.pivot_root(".", "." + OLD)
    os.chdir("/")
    kernel.unmount(OLD)
    os.rmdir(OLD)
    kernel.seal("/", recursive=False)


def _base() -> str:
    """A folder to mount on; what it held stays reachable through the old root."""
    return next(path for path in ("/tmp", "/mnt", "/var/tmp", "/usr") if os.path.isdir(path))


def _bind(source: str, place: str, sealed: bool) -> None:
    target = NEW + place
    if os.path.lexists(target):
        return
    if os.path.isdir(OLD + source):
        os.makedirs(target, mode=0o755)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(OLD + source, target, flags=kernel.MS_BIND | kernel.MS_REC)
    if sealed:
        kernel.seal(target)


def _furnish(user: int, group: int) -> None:
    """All that is not bound."""
    for path in ("/etc", "/dev", "/proc", "/var", FOLDER, OLD):
        os.makedirs(NEW + path, mode=0o755, exist_ok=True)
    for name, text in ETC.items():
        with open(f"{NEW}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text.format(user=user, group=group))
    for path, target in LINKS.items():
        with suppress(FileExistsError):
            os.symlink(target, NEW + path)
    kernel.mount(f"{OLD}/proc", f"{NEW}/proc", flags=kernel.MS_BIND | kernel.MS_REC)


def mount_proc() -> bool:
    """In a mount namespace of one's own: the /proc of its processes. False where the kernel keeps the one before.

    It does so in containers that cover parts of /proc, as those with GPUs do. Landlock then hides what is not the
    candidate's own.
    """
    try:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except PermissionError:
        return False
    return True


def mount_folder(size: int, files: int) -> None:
    """In a mount namespace of one's own: a folder of so many bytes and files. Raises `OSError`."""
    options = f"mode=0700,size={size},nr_inodes={files + len(SUBFOLDERS) + 2}"
    kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for name in SUBFOLDERS:
        os.mkdir(f"{FOLDER}/{name}", 0o700)
