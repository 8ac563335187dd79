"""Short proofs without torch, each the witness of a safeguard that `test_mutants.py` takes away."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.integration

ALONE = ["sync", "lockstep"]
KILLED = {
    "trained": ("drops", "ledger.trained.before:3"),
    "rewound": ("stages", "ledger.trained.after:3"),
    "suspended": ("over", "checkpoint.renamed:1"),
    "swept": ("sync", "loop.exported:1", "litter"),
    "again and again": ("turns", "loop.stepped:4", "ledger.rewind.after:1", "loop.stepped:2"),
}


def witness(*words):
    done = subprocess.run(
        [sys.executable, str(HERE / "witness.py"), *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("scenario", ALONE)
def test_two_runs_that_nobody_kills_are_the_same(scenario):
    witness(scenario)


@pytest.mark.parametrize("words", KILLED.values(), ids=KILLED)
def test_a_run_killed_at_a_boundary_is_the_same(words):
    witness(*words)


CHILD = "import os, signal, sys; from slime_core.clusters.channel import die_with; die_with(int(sys.argv[1])); print('there', flush=True); signal.pause()"
DRIVER = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_that_stands_still_dies_with_its_driver():
    """The kernel does it, whatever the child is at."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    child = int(driver.stdout.readline())
    gone = os.pidfd_open(child)
    try:
        os.kill(child, signal.SIGSTOP)
        driver.kill()
        driver.wait()
        driver.stdout.close()
        assert ended(gone), "it outlived its driver"
    finally:
        if not ended(gone, 0):
            os.kill(child, signal.SIGKILL)
        os.close(gone)


def ended(fd, seconds=10):
    import select

    return bool(select.select([fd], [], [], seconds)[0])
