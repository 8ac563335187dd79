"""The system-call filter as a program: run by a small machine of this file's own, for both architectures."""

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from slime_sandbox import syscalls
from slime_sandbox.counting import Counting
from slime_sandbox.seccomp import Rules, program

pytestmark = pytest.mark.unit

ALLOW, KILL, COUNT = "allow", "kill", "count"
ARCHES = {0: 0xC000003E, 1: 0xC00000B7}  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64 of linux/audit.h
TABLES = (
    *(syscalls.COUNTED, syscalls.QUIET, syscalls.HIDDEN, syscalls.MEMORY_FILES),
    *(syscalls.GROUPS, syscalls.OPENS, syscalls.JUDGED),
)


def decide(code, arch, number, *words):
    """What classic BPF says of `struct seccomp_data`: the instructions of linux/bpf_common.h that matter here."""
    words = [word & (1 << 64) - 1 for word in (*words, *[0] * (6 - len(words)))]
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *words)
    at = value = 0
    while True:
        kind, true, false, constant = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif kind == 0x54:
            value &= constant
        elif kind in (0x15, 0x25, 0x45):
            taken = {0x15: value == constant, 0x25: value > constant, 0x45: bool(value & constant)}[kind]
            at += true if taken else false
        else:
            assert kind == 0x06
            action, low = constant & 0xFFFF0000, constant & 0xFFFF
            return {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x7FC00000: COUNT, 0x50000: -low}[action]


STRONG = Rules(memory_files=False, own_groups=True)
MEDIUM = Rules(memory_files=True, own_groups=False, signals_within=77)


@pytest.fixture(params=ARCHES, ids=["x86_64", "aarch64"])
def machine(request):
    """``ask(rules, number pair, *words)``, on one architecture."""

    def ask(rules, pair, *words):
        return decide(program(request.param, rules), ARCHES[request.param], pair[request.param], *words)

    return ask


@pytest.mark.parametrize(
    ("pair", "words", "said"),
    [
        pytest.param((0, 63), (), ALLOW, id="read"),
        pytest.param((9, 222), (), ALLOW, id="mmap"),
        pytest.param((59, 221), (), ALLOW, id="execve"),
        pytest.param((101, 117), (), COUNT, id="ptrace"),
        pytest.param((425, 425), (), COUNT, id="io_uring_setup"),
        pytest.param((257, 56), (), COUNT, id="openat is looked at"),
        pytest.param((435, 435), (), -errno.ENOSYS, id="clone3"),
        pytest.param((462, 462), (), ALLOW, id="the last that was judged"),
        pytest.param((463, 463), (), -errno.ENOSYS, id="one that is newer"),
        pytest.param((0x40000000, 0x40000000), (), -errno.ENOSYS, id="the x32 way"),
        pytest.param((0xFFFFFFFF, 0xFFFFFFFF), (), -errno.ENOSYS, id="minus one"),
        pytest.param((41, 198), (1,), -errno.EACCES, id="a local socket"),
        pytest.param((41, 198), (2,), COUNT, id="an internet socket"),
        pytest.param((41, 198), (40,), COUNT, id="a vsock"),
        pytest.param((53, 199), (1, 1), ALLOW, id="a local stream pair"),
        pytest.param((53, 199), (1, 0o2000001), ALLOW, id="one that is closed on exec"),
        pytest.param((53, 199), (1, 5), ALLOW, id="a packet pair"),
        pytest.param((53, 199), (1, 2), COUNT, id="a datagram pair"),
        pytest.param((53, 199), (2, 1), COUNT, id="an internet pair"),
        pytest.param((44, 206), (3, 9, 1, 0, 0), ALLOW, id="a message on a pair"),
        pytest.param((44, 206), (3, 9, 1, 0, 4096), COUNT, id="to an address"),
        pytest.param((44, 206), (3, 9, 1, 0, 1 << 32), COUNT, id="to one above 4 GiB"),
        pytest.param((56, 220), (17,), ALLOW, id="fork"),
        pytest.param((56, 220), (0x3D0F00,), ALLOW, id="a thread"),
        pytest.param((56, 220), (0x10000011,), COUNT, id="a user namespace"),
        pytest.param((56, 220), (0x02000011,), COUNT, id="a cgroup namespace"),
        pytest.param((56, 220), (0x00020011,), COUNT, id="a mount namespace"),
        pytest.param((16, 29), (0, 0x5401), ALLOW, id="a terminal's settings"),
        pytest.param((16, 29), (0, 0x5412), COUNT, id="a terminal's input"),
        pytest.param((16, 29), (0, 0x541C), COUNT, id="a console"),
        pytest.param((157, 167), (15,), ALLOW, id="a thread's name"),
        pytest.param((157, 167), (22,), COUNT, id="a filter"),
        pytest.param((319, 279), (), -errno.EPERM, id="a memory file"),
        pytest.param((112, 157), (), ALLOW, id="a session"),
        pytest.param((62, 129), (1, 9), ALLOW, id="a signal, where the namespace sees to it"),
    ],
)
def test_the_filter_of_level_strong_returns_by_call_and_arguments(machine, pair, words, said):
    assert machine(STRONG, pair, *words) == said


@pytest.mark.parametrize(
    ("pair", "words", "said"),
    [
        pytest.param((319, 279), (), ALLOW, id="a memory file that is counted"),
        pytest.param((112, 157), (), -errno.EPERM, id="a session"),
        pytest.param((109, 154), (), -errno.EPERM, id="a process group"),
        pytest.param((62, 129), (77, 9), ALLOW, id="a signal to itself"),
        pytest.param((62, 129), (0, 9), ALLOW, id="to its group"),
        pytest.param((62, 129), (-77, 9), ALLOW, id="to its group by number"),
        pytest.param((62, 129), (1, 9), COUNT, id="to another"),
        pytest.param((62, 129), (-1, 9), COUNT, id="to everybody"),
        pytest.param((234, 131), (77, 78, 6), ALLOW, id="to a thread of its own"),
        pytest.param((234, 131), (78, 78, 6), COUNT, id="to another's thread"),
        pytest.param((200, 130), (77, 9), COUNT, id="to a thread by number alone"),
    ],
)
def test_the_filter_of_level_medium_returns_by_call_and_arguments(machine, pair, words, said):
    assert machine(MEDIUM, pair, *words) == said


@pytest.mark.parametrize("arch", [0x40000003, 0, 0xC000003F])
def test_another_architectures_calls_end_the_process(arch):
    """Such as int 0x80 of 32-bit programs, whose numbers mean other calls."""
    assert [decide(program(index, STRONG), arch, 20) for index in ARCHES] == [KILL, KILL]


@pytest.mark.parametrize("index", ARCHES)
def test_every_call_of_the_tables_is_denied_counted_or_judged(index):
    code = program(index, Rules(memory_files=False, own_groups=False, signals_within=5))
    for table in TABLES[:6]:
        for name, pair in table.items():
            if pair[index] is not None:
                assert decide(code, ARCHES[index], pair[index]) != ALLOW, name
    numbers = [pair[index] for table in TABLES for pair in table.values() if pair[index] is not None]
    assert len(numbers) == len(set(numbers))
    assert max(numbers) <= syscalls.LAST
    assert len(code) // 8 < 4096, "BPF_MAXINSNS"


OURS = "/root"
HEADERS = {0: "asm/unistd_64.h", 1: "asm-generic/unistd.h"}


def test_the_numbers_are_the_kernels():
    """Compared with whatever headers this machine has; the generic ones are aarch64's."""
    places = [Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu")]
    for index, name in HEADERS.items():
        for header in (place / name for place in places if (place / name).exists()):
            found = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)$", header.read_text(), flags=re.M))
            for table in TABLES:
                for call, pair in table.items():
                    if call in found:
                        assert pair[index] == int(found[call]), (header, call)


@pytest.mark.parametrize(
    ("path", "flags", "counted"),
    [
        ("/usr/lib/x.so", os.O_RDONLY, ""),
        ("/usr/lib/none", os.O_RDONLY, ""),
        ("/etc/shadow", os.O_RDONLY, "read:/etc/shadow"),
        ("/etc/shadow-", os.O_RDONLY, ""),
        (f"{OURS}/.ssh/id", os.O_RDONLY, "read:/root"),
        ("/rooted", os.O_RDONLY, ""),
        (f"{OURS}/venv/lib/a.py", os.O_RDONLY, ""),
        (f"{OURS}/venv/lib/a.py", os.O_WRONLY, "write"),
        ("/proc/1/environ", os.O_RDONLY, "read:/proc/1"),
        ("/proc/12/stat", os.O_RDONLY, ""),
        ("/proc/self/mem", os.O_RDWR, ""),
        ("/sandbox/kernel.py", os.O_RDWR | os.O_CREAT, ""),
        ("/sandboxes", os.O_CREAT, "write"),
        ("/tmp/x", os.O_WRONLY | os.O_CREAT, ""),
        ("/dev/nvidia0", os.O_RDWR, ""),
        ("/result.json", os.O_RDONLY | os.O_TRUNC, "write"),
    ],
)
def test_opening_a_file_counts_by_path_and_flags(path, flags, counted):
    counting = Counting("/sandbox", ["/usr", f"{OURS}/venv/lib"])
    assert counting.of(path, flags) == counted
