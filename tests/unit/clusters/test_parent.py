"""Children that would be orphans, and how a process ended, in words."""

import os
import signal
import subprocess
import sys

import pytest

from slime_core.clusters.channel import end_of

pytestmark = pytest.mark.unit

CHILD = """
import os, signal, sys
from slime_core.parent import die_with
die_with(int(sys.argv[1]))
for name in ("SIGINT", "SIGTERM"):
    os.kill(os.getpid(), getattr(signal, name))
print("alive")
"""


@pytest.mark.parametrize("parent", ["ours", "gone"])
def test_a_child_goes_on_only_while_the_process_that_started_it_is_its_parent(parent):
    """The moment before the kernel was told; signals to the whole group are the parent's."""
    started_by = os.getpid() if parent == "ours" else os.getppid()
    done = subprocess.run([sys.executable, "-c", CHILD, str(started_by)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == ((0, "alive\n") if parent == "ours" else (1, ""))


def test_the_end_of_a_process_is_told_by_signal_or_exit_code():
    assert end_of(-signal.SIGKILL) == "was killed by SIGKILL"
    assert end_of(3) == "ended with exit code 3"
    assert end_of(-200) == "was killed by signal 200"
