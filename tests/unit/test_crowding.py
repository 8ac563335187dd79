"""libgomp's threads spin for long on a machine of their own, and shortly beside a busy program."""

import os
import subprocess
import sys
import threading

import pytest

from slime_core.threads import ASKED, Crowding, busy_seconds

pytestmark = pytest.mark.unit

WAITS = """
import os, time, torch
from slime_core.threads import crowd, libgomp

torch.set_num_threads(2)
ones = torch.ones(200_000)

def waiting():
    began = time.process_time()
    for _ in range(20):
        ones.add_(1)  # by two threads; the second one then waits for more
        time.sleep(0.005)
    return time.process_time() - began

assert libgomp() is not None
waiting()
alone, threads = waiting(), len(os.listdir("/proc/self/task"))
with crowd(len(os.sched_getaffinity(0)) + 1):
    assert len(os.listdir("/proc/self/task")) > threads
    crowded = waiting()
assert alone > 2 * crowded, (alone, crowded)
assert waiting() > 2 * crowded
"""


def test_waits_are_short_in_a_crowd_and_long_again_after_it():
    """In seconds of the processor, so that a busy machine changes little."""
    env = {name: text for name, text in os.environ.items() if name not in (*ASKED, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", WAITS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("threads", "crowded"), [(1, False), (1000, True)])
def test_a_crowd_is_more_threads_that_want_to_run_than_cores(threads, crowded):
    crowding = Crowding(threads)
    crowding.close()
    assert crowding._crowded(set(range(500))) == crowded
    assert busy_seconds(os.sched_getaffinity(0)) > 0


@pytest.mark.parametrize(("threads", "name"), [(1, ""), (2, "OMP_WAIT_POLICY"), (2, "GOMP_SPINCOUNT")])
def test_nothing_is_changed_for_one_thread_or_where_the_environment_says_how_to_wait(monkeypatch, threads, name):
    if name:
        monkeypatch.setenv(name, "PASSIVE" if name == "OMP_WAIT_POLICY" else "5")
    before = threading.active_count()
    crowding = Crowding(threads)
    assert threading.active_count() == before
    crowding.close()
