"""Which level a machine gives to whom. Real users, real refusals of the kernel, the real door.

As a script this is a driver of its own, to be killed, made poor or run as somebody else: it opens a sandbox and says
what it sees as JSON lines.

    python test_sandbox_levels.py LEVEL [--as-plain-user] [--no-user-namespaces] [--root-in-name] [--covered-proc]
                                  [--no-landlock] JOB ...

Jobs are `battery`, `hold` and `crowd`. As root, ``--as-plain-user`` becomes user 4242 first, with Python's folders made
reachable.
"""

import asyncio
import ctypes
import json
import os
import resource
import socket
import struct
import subprocess
import sys
from dataclasses import asdict

import pytest

from slime_core.errors import SandboxError
from slime_sandbox import Limits, Outcome, Policy, Sandbox, kernel
from slime_sandbox.levels import WAYS, out_of_reach
from slime_sandbox.selftest import witnesses
from slime_sandbox.view import readable

pytestmark = pytest.mark.integration

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
PLAIN = 4242
ALLOCATE = "x = bytearray(1 << 30)"
WORST = {
    "answers": ("answer = b'yes'", ("ok", "yes")),
    "infinite loop": ("while True: pass", ("timeout", "")),
    "memory": (ALLOCATE, ("memory", "")),
    "output": ("while True: print('x' * 1000)", ("too_much_output", "")),
    "fork bomb": ("while True: os.fork()", ("died", "")),
    "files": ("i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w').close()", ("died", "")),
    "segfault": ("import ctypes; ctypes.string_at(0)", ("died", "")),
    "daemon": ("import subprocess\nsubprocess.Popen(['sleep', '9753'])\nanswer = b'left'", ("ok", "left")),
    "kills": ("try: os.kill(os.getppid() or 1, 9)\nexcept OSError as e: answer = type(e).__name__.encode()", ("ok", "PermissionError")),
    "network": ("import socket\ntry: socket.socket()\nexcept OSError as e: answer = str(e.errno).encode()", ("ok", "1")),
}  # fmt: skip


def drive(level, *words, stdin=""):
    """Lines that a driver of its own says."""
    command = [sys.executable, __file__, level, *words]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("level", ["strong", "medium"])
def test_a_plain_user_has_every_layer_and_the_worst_end_well(processes, level):
    opened, *ended = drive(
        level, "--as-plain-user", "battery", stdin=json.dumps([source for source, _ in WORST.values()]) + "\n"
    )
    assert (opened["level"], opened["layers"], opened["missing"]) == (level, list(WAYS[level][0]), None)
    assert opened["user"] != 0
    assert [(one["status"], one["result"]) for one in ended] == [expected for _, expected in WORST.values()], ended
    assert ended[-1]["violations"] == {"socket": 1}
    assert {one["level"] for one in ended} == {level}
    assert processes.with_words("sleep 9753") == []


def test_this_user_has_every_layer_of_level_strong(sandbox):
    assert sandbox.box.missing is None, sandbox.box.missing
    assert [one.layer for one in sandbox.box.witnesses if one.holds] == list(WAYS["strong"][0])
    assert (sandbox.box.level, sandbox.box.layers) == ("strong", WAYS["strong"][0])


def test_without_user_namespaces_strong_is_refused_with_the_layer_and_the_fix():
    (said,) = drive("strong", "--as-plain-user", "--no-user-namespaces")
    error = said["error"]
    assert error["code"] == "SBX134"
    assert error["what"] == "sandbox level 'strong' is out of reach: user namespace"
    assert "No space left on device" in error["why"], "what the kernel says beyond user.max_user_namespaces"
    assert "sysctl -w user.max_user_namespaces" in error["fix"]
    assert "--sandbox-level medium" in error["fix"]


def test_without_user_namespaces_auto_is_medium_and_says_why():
    (said,) = drive("auto", "--as-plain-user", "--no-user-namespaces")
    assert (said["level"], said["layers"]) == ("medium", list(WAYS["medium"][0]))
    assert said["missing"] == "sandbox level 'strong' is out of reach: user namespace"


def test_without_landlock_medium_is_made_of_namespaces_and_says_why():
    stdin = json.dumps(["import socket\ntry: socket.socket()\nexcept OSError: pass\nanswer = b'1'"]) + "\n"
    said, ended = drive("auto", "--as-plain-user", "--no-landlock", "battery", stdin=stdin)
    assert (said["level"], said["layers"]) == ("medium", list(WAYS["medium"][1]))
    assert said["missing"] == "sandbox level 'strong' is out of reach: landlock"
    assert (ended["status"], ended["violations"], ended["level"]) == ("ok", {"socket": 1}, "medium")


def test_without_landlock_and_namespaces_there_is_no_level_but_none():
    (said,) = drive("auto", "--as-plain-user", "--no-user-namespaces", "--no-landlock")
    assert said["error"]["code"] == "SBX134"
    assert "--sandbox-level none --i-trust-this-code true" in said["error"]["fix"]


SEES = """
seen = []
for path in ('/proc', '/proc/1/cmdline', '/proc/self/status', '/proc/cpuinfo'):
    try:
        os.listdir(path) if path == '/proc' else open(path).close()
        seen.append(path)
    except OSError: pass
import socket
try: socket.socket()
except OSError: pass
answer = repr(seen).encode()
"""


def test_where_a_container_covers_proc_level_strong_hides_that_of_others():
    said, ended = drive("strong", "--as-plain-user", "--covered-proc", "battery", stdin=json.dumps([SEES]) + "\n")
    assert (said["level"], said["layers"]) == ("strong", list(WAYS["strong"][0]))
    assert (ended["status"], ended["result"]) == ("ok", "['/proc/self/status', '/proc/cpuinfo']"), ended
    assert ended["violations"] == {"socket": 1}


def test_root_of_a_container_without_root_has_every_layer():
    source = "answer = repr((os.getuid(), os.geteuid())).encode()"
    said, ended = drive("strong", "--as-plain-user", "--root-in-name", "battery", stdin=json.dumps([source]) + "\n")
    assert (said["level"], said["layers"], said["user"]) == ("strong", list(WAYS["strong"][0]), 0)
    assert ended["result"] == "(65534, 65534)"


def test_where_a_container_covers_proc_and_nothing_hides_it_there_is_no_jail_of_namespaces():
    (said,) = drive("auto", "--as-plain-user", "--covered-proc", "--no-landlock")
    assert said["error"]["code"] == "SBX134"


def test_level_none_is_refused_without_trust():
    with pytest.raises(SandboxError) as caught:
        asyncio.run(Sandbox.open(Policy(level="none")))
    assert caught.value.code == "SBX134"
    assert "with your rights" in caught.value.what
    assert "--i-trust-this-code true" in caught.value.fix


def test_level_none_with_trust_still_ends_started_processes(processes):
    async def attempt():
        policy = Policy(level="none", i_trust_this_code=True)
        async with await Sandbox.open(policy, preload=("sandbox_entries",)) as box:
            source = "import subprocess\nsubprocess.Popen(['sleep', '9751'])\nanswer = b'left'"
            return await box.run("sandbox_entries:run_source", source.encode())

    outcome = asyncio.run(attempt())
    assert (outcome.result, outcome.level, outcome.layers) == (b"left", "none", ("rlimits",))
    assert processes.with_words("sleep 9751") == []


def test_an_architecture_without_a_table_is_refused(monkeypatch):
    from slime_sandbox import levels

    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError) as caught:
        levels.reach({"level": "medium", "layers": WAYS["medium"][0]})
    assert caught.value.code == "SBX134"
    assert "riscv64" in caught.value.why
    assert "x86_64 or aarch64" in caught.value.fix


@pytest.mark.parametrize("level", ["strong", "medium"])
def test_every_layer_has_a_name_a_fix_or_a_lower_level(level):
    for layer in WAYS[level][0]:
        error = out_of_reach(level, layer, "because")
        assert layer in error.what
        assert layer in error.where
        assert error.fix


COUNTED = {"socket": 1, "unshare": 1, "ptrace": 1}


@pytest.mark.parametrize(
    ("layer", "control", "probe", "counted", "holds"),
    [
        ("uid", True, False, {}, True),
        ("uid", True, True, {}, False),
        ("uid", False, False, {}, False),
        ("seccomp", True, False, COUNTED, True),
        ("seccomp", True, False, {}, False),
        ("seccomp", True, False, COUNTED | {"socket": 2}, False),
    ],
)
def test_a_layer_holds_where_its_control_works_its_probe_does_not_and_denials_are_counted(
    layer, control, probe, counted, holds
):
    outcome = Outcome(status="ok", violations=counted)
    (one,) = witnesses({layer: [["may", control], ["may not", probe]]}, outcome)
    assert (one.layer, one.holds) == (layer, holds)


def test_a_self_test_that_fails_refuses_the_level(monkeypatch):
    """As if the filter had been put on, and had counted nothing."""
    from slime_sandbox import selftest

    monkeypatch.setattr(selftest, "EXPECTED", {"socket": 2})
    with pytest.raises(SandboxError) as caught:
        asyncio.run(Sandbox.open(Policy(level="strong")))
    assert (caught.value.code, "seccomp" in caught.value.what) == ("SBX134", True)
    assert "counted {'socket': 1}" in caught.value.why


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(SandboxError, match="no_such_module"):
        asyncio.run(Sandbox.open(Policy(), preload=("no_such_module",)))


def test_a_module_that_cannot_be_imported_is_named_with_its_error():
    with pytest.raises(SandboxError, match="RuntimeError: not today") as caught:
        asyncio.run(Sandbox.open(Policy(), preload=("sandbox_broken",)))
    assert caught.value.where == "sandbox_broken"


def test_a_module_that_starts_threads_cannot_be_preloaded():
    with pytest.raises(SandboxError) as caught:
        asyncio.run(Sandbox.open(Policy(), preload=("sandbox_threads",)))
    assert (caught.value.code, "2 threads" in caught.value.what) == ("SBX129", True)


def test_the_view_holds_python_and_the_modules_and_no_home(tmp_path):
    (tmp_path / "more").mkdir()
    places = readable(("sandbox_entries",), [str(tmp_path / "more"), str(tmp_path / "missing")], gpu=False)
    assert os.path.join(os.path.dirname(__file__), "sandbox_entries.py") in places
    assert str(tmp_path / "more") in places
    assert str(tmp_path / "missing") not in places
    assert os.path.join(sys.base_prefix, "lib") in places or "/usr" in places
    assert not {"/", "/root", "/home", os.path.expanduser("~"), os.getcwd()} & set(places)
    assert all(not b.startswith(a + "/") for a in places for b in places)


def test_a_folder_that_may_be_read_is_there_whole_though_names_of_its_parts_come_before_it(sandbox):
    """/bin is a link to /usr/bin on most machines, and /usr/local, where drivers of GPUs lie, is no part of any link."""
    outcome = sandbox.candidate("answer = ' '.join(sorted(os.listdir('/usr'))).encode()")
    assert outcome.result.decode().split() == sorted(os.listdir("/usr")), outcome


def reachable():
    """In a mount namespace of our own, open the way to Python and to the repository for every user, read-only for others."""
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


def enter_user_namespace(more=0, **ids):
    """Enter a user namespace of our own, and ``more`` namespaces."""
    user, group = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER | more)
    kernel.map_self(user, group, **ids)


def without_user_namespaces():
    """A user namespace in which there can be no other."""
    enter_user_namespace()
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def without_landlock():
    """A filter of our own, as a kernel that was built without it would answer."""
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    given = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rows), ctypes.addressof(code)))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(22, 2, ctypes.addressof(given))


def as_root_in_name():
    """As in a container without root: user 0 of a user namespace that knows no other user."""
    enter_user_namespace(to=0)


def with_covered_proc():
    """As containers with GPUs have it: something lies over a part of /proc."""
    enter_user_namespace(kernel.CLONE_NEWNS)
    kernel.mount("tmpfs", "/proc/sys", "tmpfs")


def say(**what):
    """A line for the test."""
    print(json.dumps(what), flush=True)


async def battery(box):
    """One of each of the worst: what became of them."""
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


LIMITS = {
    "--as-plain-user": become_plain,
    "--no-user-namespaces": without_user_namespaces,
    "--root-in-name": as_root_in_name,
    "--covered-proc": with_covered_proc,
    "--no-landlock": without_landlock,
}


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    level, *words = sys.argv[1:]
    for word, limit in LIMITS.items():
        if word in words:
            limit()
    asyncio.run(main(level, [word for word in words if not word.startswith("--")]))
