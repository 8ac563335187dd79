"""What each level is made of, how a keeper gets there, and what mends a machine on which it cannot.

strong   user mount pid net ipc uts namespaces, uid, rlimits, landlock, seccomp
medium   uid, rlimits, landlock, seccomp
none     rlimits
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime_core.errors import SandboxError
from slime_sandbox import kernel, landlock, tree

NAMESPACES = ("user namespace", "mount namespace", "pid namespace", "net namespace", "ipc namespace", "uts namespace")
CONFINED = ("uid", "rlimits", "landlock", "seccomp")
WAYS = {
    "strong": ((*NAMESPACES, *CONFINED),),
    "medium": (CONFINED, (*NAMESPACES, "uid", "rlimits", "seccomp")),
    "none": (("rlimits",),),
}
"""The layers of a level, the first choice first."""
FIRST_USER, NOBODY = 0x70000000, 65534
"""Root becomes a user that nobody else is, beyond all ranges that systemd hands out; where it cannot, nobody."""
FIXES = {
    "user namespace": "sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0\nin a container: docker run --security-opt seccomp=unconfined",
    "mount namespace": "in a container: docker run --privileged, or --security-opt systempaths=unconfined",
    "landlock": "Linux 5.13 or newer with landlock in its `lsm=` parameter (cat /sys/kernel/security/lsm)",
    "seccomp": "Linux 5.5 or newer with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
    "uid": "install Python where every user can read it, or run slime as a user other than root",
}
LOWER = {"strong": "--sandbox-level medium", "medium": "--sandbox-level none --i-trust-this-code true"}
ALL_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
)
OF_A_JAIL = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
"""What a warden makes anew for its candidate; the PID namespace is made before it."""


OF_THE_FORK_SERVER = (16 << 20, 1000)
"""Bytes and files that its imports may write."""


def out_of_reach(level: str, layer: str, reason: str) -> SandboxError:
    """The error of a level that this machine does not have."""
    fixes = [FIXES.get(layer, ""), f"or less isolation: {LOWER[level]}" if level in LOWER else ""]
    return SandboxError(
        f"sandbox level '{level}' is out of reach: {layer}",
        code="SBX134",
        where=f"reward.sandbox_level, layer '{layer}'",
        why=reason,
        fix="\n".join(fix for fix in fixes if fix),
    )


@contextmanager
def layer(level: str, name: str) -> Iterator[None]:
    """What fails in here is that layer's failure."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        raise out_of_reach(level, name, str(error)) from error


def reach(setup: dict[str, Any]) -> bool:
    """Bring this process, which has one thread, to where its fork server and jails can be started.

    With namespaces the rest happens in a fork, the first process of one; the caller's process only waits. True where
    /proc is that of these processes. Raises `SandboxError` (SBX134).
    """
    os.umask(0o022)
    level, layers, root = setup["level"], setup["layers"], os.geteuid() == 0
    if "seccomp" in layers:
        with layer(level, "seccomp"):
            kernel.architecture()
    if "landlock" in layers:
        with layer(level, "landlock"):
            landlock.abi()
    spaces = "pid namespace" in layers
    built = spaces and root and _can_unshare_mounts()
    if built:
        with layer(level, "mount namespace"):
            tree.build(setup["readable"], setup["gpu"], setup["user"], setup["user"])
    if root and "uid" in layers:
        _become(setup["user"], level, spaces)
    if spaces:
        _namespaces(level)
        if not built:
            with layer(level, "mount namespace"):
                tree.build(setup["readable"], setup["gpu"], os.getuid(), os.getgid())
        return _be_first(level, setup["driver"], "landlock" in layers)
    return True


def _can_unshare_mounts() -> bool:
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False
    return True


def _become(user: int, level: str, spaces: bool) -> None:
    """Root gives up being root, for good."""
    with layer(level, "uid"):
        for identity in (user, NOBODY):
            try:
                os.setgroups([])
                os.setresgid(identity, identity, identity)
                os.setresuid(identity, identity, identity)
                break
            except OSError:
                if identity == NOBODY and not (spaces and _root_in_name()):
                    raise
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self would still be root's
        for path in (os.path.realpath(sys.executable), os.__file__):
            with open(path, "rb"):
                pass


def _root_in_name() -> bool:
    """Whether who is called root here is somebody else outside of this user namespace, as in rootless containers."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        first, outside, _ = file.readline().split()
    return first == "0" and outside != "0"


def _namespaces(level: str) -> None:
    user, group = os.getuid(), os.getgid()
    with layer(level, "user namespace"):
        kernel.unshare(ALL_NAMESPACES)
        kernel.map_self(user, group, to=None if user else NOBODY)


def _be_first(level: str, driver: int, hidden: bool) -> bool:
    kernel.end_with(driver)
    pid = os.fork()
    if pid:
        os.closerange(3, 1 << 16)
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.end_with(0)
    mounted = tree.mount_proc()
    if not mounted and not hidden:
        raise out_of_reach(
            level, "mount namespace", "this container covers parts of /proc, and shows all processes there"
        )
    with layer(level, "mount namespace"):
        tree.mount_folder(*OF_THE_FORK_SERVER)
    os.environ["HOME"] = tree.FOLDER
    return mounted
