"""What candidates may not do, tried from inside, with the ways in which peers' graders were beaten. Each is counted."""

import asyncio
import os
import platform
import tempfile
from ast import literal_eval

import pytest

pytestmark = pytest.mark.integration

RUN_SOURCE = "sandbox_entries:run_source"

CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(word) for word in words))
    return "worked" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def opening(path, mode="rb"):
    try:
        open(path, mode).close()
        return "worked"
    except OSError as error:
        return errno.errorcode[error.errno]
import socket
def sock(*words):
    try:
        socket.socket(*words)
        return "worked"
    except OSError as error:
        return errno.errorcode[error.errno]
"""
X86 = platform.machine() == "x86_64"


def nr(x86, arm):
    return x86 if X86 else arm


TRIES = {
    "an internet socket": ("sock(socket.AF_INET)", "EPERM", "socket"),
    "a datagram socket": ("sock(socket.AF_INET6, socket.SOCK_DGRAM)", "EPERM", "socket"),
    "a raw socket": ("sock(socket.AF_PACKET, socket.SOCK_RAW)", "EPERM", "socket"),
    "netlink": ("sock(socket.AF_NETLINK, socket.SOCK_RAW)", "EPERM", "socket"),
    "a socket to the hypervisor": ("sock(socket.AF_VSOCK)", "EPERM", "socket"),
    "a local datagram pair": (f"call({nr(53, 199)}, 1, 2, 0, 0)", "EPERM", "socketpair"),
    "a message to an address": (f"call({nr(44, 206)}, 3, 0, 0, 0, 4096, 16)", "EPERM", "sendto"),
    "connecting the channel": (f"call({nr(42, 203)}, 3, 0, 0)", "EPERM", "connect"),
    "tracing": (f"call({nr(101, 117)}, 16, 1, 0, 0)", "EPERM", "ptrace"),
    "another's memory": (f"call({nr(310, 270)}, 1, 0, 0, 0, 0, 0)", "EPERM", "process_vm_readv"),
    "another's descriptors": ("call(438, 3, 0, 0)", "EPERM", "pidfd_getfd"),
    "io_uring": ("call(425, 8, 0)", "EPERM", "io_uring_setup"),
    "a user namespace": (f"call({nr(272, 97)}, 0x10000000)", "EPERM", "unshare"),
    "a user namespace with a process": (f"call({nr(56, 220)}, 0x10000011, 0, 0, 0, 0)", "EPERM", "clone"),
    "entering a namespace": (f"call({nr(308, 268)}, 0, 0)", "EPERM", "setns"),
    "a mount": (f"call({nr(165, 40)}, 0, 0, 0, 0, 0)", "EPERM", "mount"),
    "a mount of the new kind": ("call(430, 0, 0)", "EPERM", "fsopen"),
    "another root": (f"call({nr(161, 51)}, 0)", "EPERM", "chroot"),
    "a program in the kernel": (f"call({nr(321, 280)}, 0, 0, 0)", "EPERM", "bpf"),
    "counters of the processor": (f"call({nr(298, 241)}, 0, 0, 0, 0, 0)", "EPERM", "perf_event_open"),
    "keys": (f"call({nr(250, 219)}, 0, 0, 0)", "EPERM", "keyctl"),
    "page faults": (f"call({nr(323, 282)}, 0)", "EPERM", "userfaultfd"),
    "a filter of its own": (f"call({nr(317, 277)}, 1, 8, 0)", "EPERM", "seccomp"),
    "a filter the old way": (f"call({nr(157, 167)}, 22, 2, 0)", "EPERM", "prctl"),
    "words in the terminal": (f"call({nr(16, 29)}, 0, 0x5412, 0)", "EPERM", "ioctl"),
    "the password file": ("opening('/etc/shadow')", "ENOENT", "read:/etc/shadow"),
    "somebody's keys": ("opening('/root' + '/.ssh/id_rsa')", "ENOENT", "read:/root"),
    "somebody's home": ("opening('/home' + '/user/.netrc')", "ENOENT", "read:/home"),
    "the way up": ("opening('../../root/.bashrc')", "ENOENT", "read:/root"),
    "the environment of who watches": ("opening('/proc/1/environ')", "EACCES", "read:/proc/1"),
    "the memory of who watches": ("opening('/proc/1/mem', 'r+b')", "EACCES", "write"),
    "a program's file": ("opening('/usr/bin/env', 'r+b')", "EROFS EACCES", "write"),
    "Python's own library": ("opening(os.__file__, 'r+b')", "EROFS EACCES", "write"),
    "a file elsewhere": ("opening('/result.json', 'wb')", "EROFS", "write"),
}  # fmt: skip
UNCOUNTED = {
    "a local socket": ("sock(socket.AF_UNIX)", "EACCES"),
    "clone3, whose flags no filter sees": ("call(435, 0, 0)", "ENOSYS"),
    "a call that is newer than the filter": ("call(1000, 0, 0)", "ENOSYS"),
    "shared memory of System V": (f"call({nr(29, 194)}, 1, 4096, 950)", "EPERM"),
    "an anonymous memory file": (f"call({nr(319, 279)}, 0, 0)", "EPERM"),
    "a file that is not there": ("opening('/usr/share/no-such-file')", "ENOENT"),
    "a signal to who watches": (f"call({nr(62, 129)}, 1, 9)", "EPERM"),
    "becoming root": (f"call({nr(105, 146)}, 0)", "EINVAL"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIES)
def test_denied_calls_are_counted(sandbox, name):
    source, answer, counted = TRIES[name]
    outcome = sandbox.candidate(f"{CALL}\nanswer = {source}.encode()")
    assert outcome.violations == {counted: 1}, outcome.stdout
    assert outcome.result.decode() in answer.split()


@pytest.mark.parametrize("name", UNCOUNTED)
def test_calls_that_libraries_try_are_denied_and_not_counted(sandbox, name):
    source, answer = UNCOUNTED[name]
    outcome = sandbox.candidate(f"{CALL}\nanswer = {source}.encode()")
    assert (outcome.result.decode(), outcome.violations) == (answer, {}), outcome.stdout


def test_calls_that_kernels_need_work_and_count_nothing(sandbox):
    source = """
import multiprocessing, subprocess, tempfile, threading, getpass, mmap
with tempfile.NamedTemporaryFile() as file, open('/dev/shm/x', 'wb') as shared:
    file.write(b'x'); shared.write(b'y')
os.rename('/dev/shm/x', 'moved')
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
if not os.fork(): os._exit(0)
os.wait()
said = subprocess.run([os.sys.executable, '-I', '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout
with multiprocessing.get_context('fork').Pool(1) as pool: squares = pool.map(abs, [-3])
answer = repr((said.strip(), squares, getpass.getuser(), os.cpu_count() > 0)).encode()
"""
    outcome = sandbox.candidate(source)
    assert (outcome.result, outcome.violations) == (b"('42', [3], 'candidate', True)", {}), outcome.stdout


def test_every_try_is_counted_and_none_can_be_uncounted(sandbox):
    """A signal handler, a child process and a thread make no difference: the filter answers to the warden alone."""
    source = f"""{CALL}
import threading
for _ in range(7): sock(socket.AF_INET)
if not os.fork():
    sock(socket.AF_INET); os._exit(0)
os.wait()
thread = threading.Thread(target=lambda: sock(socket.AF_INET)); thread.start(); thread.join()
os.kill(os.getpid(), 9)
"""
    outcome = sandbox.candidate(source)
    assert (outcome.signal, outcome.violations) == (9, {"socket": 9})


def test_the_environment_is_empty_but_for_what_it_needs(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    outcome = sandbox.candidate("answer = repr(sorted(os.environ)).encode()")
    assert set(literal_eval(outcome.result.decode())) == {
        *("PATH", "LANG", "USER", "LOGNAME", "HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
        *("XDG_CACHE_HOME", "CUDA_CACHE_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    }


SCAN = """
hidden, other = bytes.fromhex('{hidden}'), bytes(byte ^ 255 for byte in range(256))
regions = [line.split()[:2] for line in open('/proc/self/maps') if '[v' not in line]
def holds(place):  # in a process of its own: what it makes while it looks is not looked at
    start, end = (int(x, 16) for x in place.split('-'))
    with open('/proc/self/mem', 'rb', 0) as memory:
        try: held = os.pread(memory.fileno(), end - start, start)
        except OSError: return False
    return hidden in held.translate(other)
found = 0
for place, rights in regions:
    if 'r' in rights:
        pid = os.fork()
        if not pid: os._exit(holds(place))
        found += os.waitstatus_to_exitcode(os.wait()[1])
answer = f'{{found}} of {{len(regions)}}'.encode()
"""


def test_a_scan_of_its_memory_finds_no_secret_of_the_driver(sandbox, monkeypatch):
    """Nothing of the driver's memory and environment, nor of what the candidate before was sent."""
    secret = b"token-" + os.urandom(16).hex().encode()
    monkeypatch.setenv("SECRET_OF_THE_RUN", secret.decode())
    kept = [bytearray(secret) for _ in range(100)]
    assert sandbox.candidate(f"answer = b'{secret.decode()}'").result == secret
    looked = SCAN.format(hidden=bytes(byte ^ 255 for byte in secret).hex())
    assert not sandbox.candidate(f"mine = b'{secret.decode()}'\n{looked}").result.startswith(b"0"), "it would find one"
    outcome = sandbox.candidate(looked)
    assert outcome.result.startswith(b"0 of "), outcome
    assert len(kept) == 100


def test_a_candidates_descriptors_are_its_streams_and_its_channel(sandbox):
    outcome = sandbox.candidate(
        "answer = repr([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(4)]).encode()"
    )
    assert outcome.result == b"['/dev/null', 'pipe', 'pipe', 'socket']"
    outcome = sandbox.candidate("answer = repr(os.listdir('/proc/self/fd')).encode()")
    assert sorted(literal_eval(outcome.result.decode())) == ["0", "1", "2", "3", "4"], (
        "4 is the folder that is being listed"
    )


def test_a_candidate_that_poisons_its_process_leaves_nothing_for_the_next(sandbox):
    poison = """
import builtins, json, sys, sandbox_entries
json.loads = builtins.open = builtins.sorted = lambda *a, **k: 'poisoned'
sandbox_entries.run_source = None
sys.modules['math'] = None
for place in ('.', '/tmp', '/dev/shm', os.environ['TRITON_CACHE_DIR']):
    try:
        with os.fdopen(os.open(place + '/poison', os.O_CREAT | os.O_WRONLY), 'w') as f: f.write('x')
    except OSError: pass
os.environ['POISON'] = '1'
answer = b'poisoned'
"""
    assert sandbox.candidate(poison).result == b"poisoned"
    clean = """
import json, math
found = [place for place in ('.', '/tmp', '/dev/shm', os.environ['TRITON_CACHE_DIR']) if os.path.exists(place + '/poison')]
answer = repr((json.loads('[1]'), math.pi > 3, found, 'POISON' in os.environ, sorted([2, 1]))).encode()
"""
    assert sandbox.candidate(clean).result == b"([1], True, [], False, [1, 2])"


def test_a_candidate_has_no_capability_and_can_get_none(sandbox):
    source = """
words = open('/proc/self/status').read().split()
sets = {name: words[words.index(f'Cap{name}:') + 1] for name in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb')}
answer = repr((set(sets.values()), words[words.index('NoNewPrivs:') + 1], words[words.index('Seccomp:') + 1])).encode()
"""
    assert sandbox.candidate(source).result == b"({'0000000000000000'}, '1', '2')"


def test_neighbours_share_no_namespace(sandbox):
    source = """
import time
kinds = ('user', 'mnt', 'pid', 'net', 'ipc', 'uts')
channel.send(repr({kind: os.readlink(f'/proc/self/ns/{kind}') for kind in kinds}).encode())
channel.receive()
"""

    async def two():
        async with sandbox.box.spawn(RUN_SOURCE) as one, sandbox.box.spawn(RUN_SOURCE) as other:
            for child in (one, other):
                await child.send(source.encode())
            return [literal_eval((await child.receive(30)).decode()) for child in (one, other)]

    one, other = sandbox.run(two())
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in one}
    assert [kind for kind in own if len({own[kind], one[kind], other[kind]}) < 3] == []


def test_neighbours_neither_meet_nor_hinder_each_other(sandbox):
    """A fork bomb, and one that needs processes of its own at the same time; neither sees a process of the other."""
    bomb = "import time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.05)"
    honest = """
import time
for _ in range(30):
    if not os.fork(): os._exit(0)
    os.wait(); time.sleep(0.01)
answer = repr(sorted(int(n) for n in os.listdir('/proc') if n.isdigit())).encode()
"""

    async def both():
        return await asyncio.gather(
            sandbox.attempt(bomb, {"wall_seconds": 1.0}), *(sandbox.attempt(honest, {}) for _ in range(3))
        )

    bombed, *others = sandbox.run(both())
    assert bombed.status == "timeout"
    assert [(other.status, other.result) for other in others] == [("ok", b"[1, 2]")] * 3


def test_a_file_of_the_drivers_cannot_be_found(sandbox):
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o666)
        outcome = sandbox.candidate(f"answer = repr(os.path.exists({file.name!r})).encode()")
    assert outcome.result == b"False"


def test_only_what_was_named_of_the_machine_is_there(sandbox):
    outcome = sandbox.candidate("answer = repr((sorted(os.listdir('/etc')), sorted(os.listdir('/dev')))).encode()")
    etc, dev = literal_eval(outcome.result.decode())
    known = {
        "alternatives",
        "group",
        "hosts",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "localtime",
        "nsswitch.conf",
    }
    assert set(etc) <= known | {"passwd", "ssl"}
    assert set(dev) == {"fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"}
