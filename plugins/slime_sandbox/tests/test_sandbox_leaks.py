"""Many candidates leave nothing: memory, descriptors, processes, files. Two hundred here, ten thousand at night."""

import asyncio
import os
import select
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slime_sandbox import Limits, Policy, Sandbox
from slime_sandbox.cgroups import Groups

pytestmark = pytest.mark.integration

ENTRY = "sandbox_entries:run_source"
MIX = [
    b"answer = b'1'",
    b"open('f', 'w').write('x' * 100000)\nanswer = bytes(100000)",
    b"1 / 0",
    b"os.abort()",
    b"import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\nanswer = b'1'",
    b"print('x' * 100000)",
    b"import socket\ntry: socket.socket()\nexcept OSError: pass",
    b"while True: pass",
]
LIMITS = Limits(wall_seconds=20.0, output_bytes=50_000)
SHORT = Limits(wall_seconds=0.05)


def resident(pid):
    """Bytes of anonymous memory."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) << 10


def look(family):
    """What the long-lived processes hold: anonymous bytes and descriptors of each, the driver last."""
    pids = [*family, os.getpid()]
    return [(resident(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in pids]


def quiet(family):
    """The same, when the keeper has buried the last warden."""
    seen = []
    for _ in range(500):
        seen.append(look(family))
        if len(seen) > 5 and all(one == seen[-1] for one in seen[-5:]):
            break
        select.select([], [], [], 0.01)
    return seen[-1]


def places():
    """Folders that candidates without a tmpfs would use, and control groups."""
    groups = Groups.find()
    found = [
        name
        for folder in ("/tmp", "/dev/shm")
        for name in os.listdir(folder)
        if f"slime-sandbox-{os.getpid()}-" in name
    ]
    if groups is not None:
        groups.close()
        found += [path.name for path in groups.folder.glob(f"slime-sandbox-{os.getpid()}-*")]
    return found


async def many(box, count, at_once=4):
    """So many candidates, each kind in turn; how they ended."""
    ended = Counter()

    async def some(first):
        for number in range(first, count, at_once):
            source = MIX[number % len(MIX)]
            outcome = await box.run(ENTRY, source, SHORT if b"while" in source else LIMITS)
            ended[outcome.status] += 1

    await asyncio.gather(*(some(first) for first in range(at_once)))
    return ended


def check(processes, count):
    """Run ``count`` after a warm-up, and compare what is held before and after."""
    before, files = processes.below(os.getpid()), places()
    with asyncio.Runner() as runner:
        box = runner.run(Sandbox.open(Policy(), preload=("sandbox_entries",)))
        family = processes.below(os.getpid())
        runner.run(many(box, 40))
        first = quiet(family)
        ended = runner.run(many(box, count))
        last = quiet(family)
        assert processes.below(os.getpid()) == family
        runner.run(box.aclose())
    assert ended == {status: count // 8 * share for status, share in ENDED.items()}
    more = [after - handles for (_, handles), (_, after) in zip(first, last)]
    assert max(more) <= 0, more  # this process may lose what an earlier test left to be collected
    grown = [b - a for (a, _), (b, _) in zip(first, last)]
    assert max(grown) <= max(512 << 10, count << 6), grown
    assert processes.below(os.getpid()) == before
    assert places() == files


ENDED = {"ok": 3, "died": 3, "too_much_output": 1, "timeout": 1}


def test_two_hundred_candidates_leave_nothing(processes):
    check(processes, 200)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_candidates_leave_nothing(processes):
    """At most 64 bytes a candidate in any process, which 10,000 of them would make 640 kB."""
    check(processes, 10_000)


def test_a_group_bounds_memory_where_there_can_be_one():
    """Where this machine lets us: the kernel kills what asks for more, and says so."""
    groups = Groups.find()
    if groups is None:  # then nothing of it is used
        assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup", os.W_OK)
        return
    group = groups.take(64 << 20)
    source = f"import os; os.write({group.procs}, b'0'); held = bytearray(os.urandom(1 << 20) * 512)"
    assert subprocess.run([sys.executable, "-c", source], pass_fds=[group.procs]).returncode == -9
    assert group.ran_out()
    groups.give(group)
    again = groups.take(128 << 20)
    assert again is group
    assert not again.ran_out()
    groups.give(again)
    groups.close()
    assert list(groups.folder.glob(f"slime-sandbox-{os.getpid()}-{id(groups):x}-*")) == []


def test_a_group_of_a_process_that_was_killed_is_removed(tmp_path):
    """Its folder says whose it was; another process's that lives is left alone."""
    dead = tmp_path / "slime-sandbox-4194999-1-1"  # above PID_MAX_LIMIT
    alive = tmp_path / f"slime-sandbox-{os.getpid()}-1-1"
    dead.mkdir()
    alive.mkdir()
    Groups(tmp_path, 2)
    assert (dead.exists(), alive.exists()) == (False, True)
