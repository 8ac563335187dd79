"""A driver of its own, to be killed, made poor or run as somebody else: opens a sandbox, says what it sees as JSON lines.

    python sandbox_driver.py LEVEL [--as-plain-user] [--no-user-namespaces] [--no-landlock] JOB ...

Jobs are functions here. As root, ``--as-plain-user`` becomes user 4242 first, with Python's folders made reachable.
"""

import asyncio
import json
import os
import resource
import socket
import sys
from dataclasses import asdict

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
PLAIN = 4242


def reachable():
    """In a mount namespace of our own, open the way to Python and to the repository for every user, read-only for others."""
    from slime_sandbox import kernel

    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    wanted = {sys.prefix, sys.base_prefix, ROOT}
    closed = {top for path in wanted for top in parents(path) if not os.stat(top).st_mode & 1}
    for top in sorted(closed, key=len)[:1] if closed else ():
        stage = "/mnt"
        kernel.mount("tmpfs", stage, "tmpfs", 0, "mode=0755")
        for path in sorted(wanted):
            if path.startswith(top + "/"):
                os.makedirs(stage + path[len(top) :])
                kernel.mount(path, stage + path[len(top) :], flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(stage, top, flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.unmount(stage)


def parents(path):
    """Folders above, from the top."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: n + 1]) for n in range(len(parts))]


def become_plain():
    """Root becomes nobody in particular; others are that already."""
    if os.geteuid() == 0:
        reachable()
        os.setgroups([])
        os.setresgid(PLAIN, PLAIN, PLAIN)
        os.setresuid(PLAIN, PLAIN, PLAIN)


def without_user_namespaces():
    """A user namespace in which there can be no other."""
    from slime_sandbox import kernel

    user, group = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_self(user, group)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def without_landlock():
    """A filter of our own, as a kernel that was built without it would answer."""
    import ctypes
    import struct

    from slime_sandbox import kernel

    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    given = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rows), ctypes.addressof(code)))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(22, 2, ctypes.addressof(given))


def as_root_in_name():
    """As in a container without root: user 0 of a user namespace that knows no other user."""
    from slime_sandbox import kernel

    user, group = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_self(user, group, to=0)


def with_covered_proc():
    """As containers with GPUs have it: something lies over a part of /proc."""
    from slime_sandbox import kernel

    user, group = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    kernel.map_self(user, group)
    kernel.mount("tmpfs", "/proc/sys", "tmpfs")


def say(**what):
    """A line for the test."""
    print(json.dumps(what), flush=True)


async def battery(box):
    """One of each of the worst: what became of them."""
    from slime_sandbox import Limits

    limits = Limits(wall_seconds=5.0, memory_bytes=128 << 20, disk_bytes=8 << 20, files=100, output_bytes=1 << 16)
    for source in json.loads(sys.stdin.readline()):
        outcome = await box.run("sandbox_entries:run_source", source.encode(), limits)
        said = asdict(outcome) | {"result": outcome.result.decode()}
        say(**{name: said[name] for name in ("status", "reason", "result", "violations", "level", "stdout")})


async def hold(box):
    """A candidate with a daemon, for ever."""
    source = "import subprocess\nsubprocess.Popen(['sleep', '8642'], start_new_session=True)\nchannel.send(b'1')\nwhile 1: pass"
    async with box.spawn("sandbox_entries:run_source") as child:
        await child.send(source.encode())
        await child.receive()
        say(holds=True)
        await child.finish()


async def crowd(box):
    """One candidate while no more descriptors may travel (ETOOMANYREFS): its end, that of one from before, of one after."""
    entry, (soft, hard) = "sandbox_entries:run_source", resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = socket.socketpair()
    async with box.spawn(entry) as neighbour:
        await neighbour.send(b"channel.send(b'begun')\nanswer = channel.receive()")
        await neighbour.receive()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        socket.send_fds(ours, [b"on their way"], [0] * 100)
        ended = [await box.run(entry, b"answer = b'1'")]
        ours.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await neighbour.send(b"well")
        ended.append(await neighbour.finish())
    ended.append(await box.run(entry, b"answer = b'again'"))
    for outcome in ended:
        say(status=outcome.status, reason=outcome.reason, result=outcome.result.decode())


async def main(level, jobs):
    """Open, say how that went, do the jobs."""
    from slime_core.errors import SandboxError
    from slime_sandbox import Policy, Sandbox

    try:
        async with await Sandbox.open(
            Policy(level=level, i_trust_this_code=True), preload=("sandbox_entries",)
        ) as box:
            layers = [one.layer for one in box.witnesses if one.holds]
            say(level=box.level, layers=layers, missing=box.missing and box.missing.what, user=os.getuid())
            for job in jobs:
                await globals()[job](box)
    except SandboxError as error:
        say(error=error.as_dict())


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    level, *words = sys.argv[1:]
    if "--as-plain-user" in words:
        become_plain()
    if "--no-user-namespaces" in words:
        without_user_namespaces()
    if "--root-in-name" in words:
        as_root_in_name()
    if "--covered-proc" in words:
        with_covered_proc()
    if "--no-landlock" in words:
        without_landlock()
    asyncio.run(main(level, [word for word in words if not word.startswith("--")]))
