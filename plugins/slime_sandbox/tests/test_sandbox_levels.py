"""Which level a machine gives to whom. Real users, real refusals of the kernel, the real door."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import SandboxError
from slime_sandbox import Outcome, Policy, Sandbox
from slime_sandbox.levels import WAYS, out_of_reach
from slime_sandbox.selftest import witnesses
from slime_sandbox.view import readable

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).with_name("sandbox_driver.py")
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
    command = [sys.executable, str(DRIVER), level, *words]
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


def test_whoever_runs_this_has_every_layer_of_level_strong(sandbox):
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
    from slime_sandbox import kernel, levels

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
