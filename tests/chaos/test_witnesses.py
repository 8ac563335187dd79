"""Short proofs without torch, each the witness of a safeguard that `test_mutants.py` takes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from durability import world
from durability.audit import Audit, audit, differences
from durability.chaos import Kill, ask, run_child, tail

pytestmark = pytest.mark.integration

TOOLS = Path(__file__).parents[2] / "tools"
NIGHTLY = pytest.mark.nightly
ALONE = ["sync", pytest.param("lockstep", marks=NIGHTLY)]
KILLED = {
    "trained": ("drops", "ledger.trained.before:3"),
    "rewound": ("stages", "ledger.trained.after:3"),
    "suspended": ("over", "checkpoint.renamed:1"),
    "swept": ("sync", "loop.exported:1", "litter"),
    "again and again": ("turns", "loop.stepped:4", "ledger.rewind.after:1", "loop.stepped:2"),
}


def changes(name: str, boundaries: list[str], place: Path) -> list[str]:
    """How a run differs that is killed at boundaries, or left alone with a slow ledger, from one that is left alone."""
    scenario = world.SCENARIOS[name]
    world.install(place / "site")
    world.warm(place / "warm", [name])
    alone = world.left_alone(scenario, place / "alone", seed=3)
    again = world.World(scenario, place / "again", seed=3)
    again.slow = 0 if boundaries else 300
    for place_of_death in boundaries:
        if place_of_death == "litter":  # what a kill in the middle of a removal leaves
            (again.run_dir / "checkpoints" / ".tmp-removed-step-2-left").mkdir()
            continue
        point, _, nth = place_of_death.partition(":")
        kill = Kill(seconds=60.0, boundary=point, nth=int(nth or 1))
        ended = run_child(lambda: again.start(again.run_dir.exists()), log=again.log, kill=kill)
        if not ended.stood:
            return [f"the run never came to {place_of_death}, it ended with {ended.code}:\n{tail(again.log)}"]
    ended = run_child(lambda: again.start(again.run_dir.exists()), log=again.log)
    if ended.code or ended.left:
        return [f"the run ended with {ended}:\n{tail(again.log)}"]
    found: Any = ask(lambda: asdict(audit(again.run_dir)), log=again.log)
    ignored = world.AHEAD_OF_A_CHECKPOINT if scenario.keys.get("max_staleness") else ()
    return list(found["wrong"]) + differences(Audit(**alone["audit"]), Audit(**found), ignored)


def witness(*words):
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TOOLS}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("scenario", ALONE)
def test_two_runs_that_nobody_kills_are_the_same(scenario):
    witness(scenario)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NIGHTLY) if name in ("suspended", "again and again") else name for name in KILLED],
)
def test_a_run_killed_at_a_boundary_is_the_same(name):
    witness(*KILLED[name])


CHILD = "import os, signal, sys; from slime_core.parent import die_with; die_with(int(sys.argv[1])); print('there', flush=True); signal.pause()"
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


if __name__ == "__main__":
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="slime-witness-", dir=shared) as folder:
        print("\n".join(changes(sys.argv[1], sys.argv[2:], Path(folder))))
