"""The system calls that Python has no names for, through ctypes. Each raises `OSError` with what it was asked."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE = 1, 2, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LINUX_CAPABILITY_VERSION_3 = 0x20080522
NUMBERS = {  # name -> x86_64, aarch64; 424 and above are the same everywhere
    "capset": (126, 91),
    "pivot_root": (155, 41),
    "seccomp": (317, 277),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
ARCHITECTURES = ("x86_64", "aarch64")


def architecture() -> int:
    """Index into pairs of numbers: 0 is x86_64, 1 is aarch64. Raises `NotImplementedError` elsewhere."""
    machine = platform.machine()
    if machine not in ARCHITECTURES or struct.calcsize("P") != 8:
        raise NotImplementedError(f"no table of system calls for {machine}, {8 * struct.calcsize('P')} bit")
    return ARCHITECTURES.index(machine)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, operation: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: int | bytes | ctypes.Array | None) -> int:
    """A system call of ``NUMBERS``; integers are passed as 64 bits."""
    number = NUMBERS[name][architecture()]
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *words), name)


def unshare(flags: int) -> None:
    """Leave these namespaces for new ones."""
    _checked(_libc().unshare(flags), f"unshare({flags:#x})")


def setns(descriptor: int, flags: int) -> None:
    """Enter namespaces: of the file, or of the process that a pidfd means."""
    _checked(_libc().setns(descriptor, flags), f"setns({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    words = [text.encode() if text else None for text in (source, target, kind)]
    done = _libc().mount(*words, ctypes.c_ulong(flags), options.encode() if options else None)
    _checked(done, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and all below it."""
    _checked(_libc().umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root; the old one lies at ``old``."""
    call("pivot_root", new.encode(), old.encode())


def seal(path: str, attributes: int = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, *, recursive: bool = True) -> None:
    """Make a mount, and those below it, read-only and without set-user-id programs."""
    attribute = ctypes.create_string_buffer(struct.pack("<QQQQ", attributes, 0, 0, 0), 32)
    flags = AT_RECURSIVE if recursive else 0
    call("mount_setattr", -100, path.encode(), flags, attribute, 32)


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """prctl(2)."""
    words = [ctypes.c_ulong(word) for word in (first, second, 0, 0)]
    return _checked(_libc().prctl(option, *words), f"prctl({option})")


def end_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, is gone. A change of user undoes it.

    0 is a parent in another PID namespace, which cannot be asked for.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """Give up every capability, and all ways to get one back."""
    number = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break
        number += 1
    header = ctypes.create_string_buffer(struct.pack("<Ii", LINUX_CAPABILITY_VERSION_3, 0), 8)
    call("capset", header, ctypes.create_string_buffer(bytes(24), 24))


def map_self(user: int, group: int, to: int | None = None) -> None:
    """Right after a new user namespace: this process keeps its numbers in it, or both become ``to``."""
    inside = (user, group) if to is None else (to, to)
    maps = ((f"{name}_map", f"{new} {old} 1") for name, new, old in zip(("uid", "gid"), inside, (user, group)))
    for name, text in (("setgroups", "deny"), *maps):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)
