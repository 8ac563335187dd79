"""A long run gives back what it takes: memory, files, threads, processes, temporary files stay where they were."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


def soak(steps, timeout):
    done = subprocess.run(
        [sys.executable, str(SOAK), str(steps)], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(rows, limit):
    """After the first third nothing grows (what is open for a moment is no growth); memory by less than ``limit`` bytes
    a step."""
    third = len(rows) // 3
    early, late = rows[third : 2 * third], rows[2 * third :]
    for name in ("files", "threads", "children", "shared", "temporary"):
        assert min(row[name] for row in late) <= max(row[name] for row in early), name
    assert max(row["children"] for row in rows) == 0
    assert rows[-1]["temporary"] == 0
    means = [sum(row["rss"] for row in part) / len(part) for part in (early, late)]
    slope = (means[1] - means[0]) / third / 5  # a row for every fifth step
    print(f"{5 * len(rows)} steps: {slope:.0f} bytes a step, {late[-1]}")
    assert slope < limit


@pytest.mark.integration
def test_three_hundred_steps_leave_nothing_behind():
    check(soak(300, 250), limit=8192)  # the allocator's own steps are most of it here; nightly is strict


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_steps_leave_nothing_behind():
    check(soak(1000, 1700), limit=1024)
