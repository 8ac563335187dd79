"""SIGKILL at random moments, no torch: 0 lost, 0 doubled, the same `final/`. `tools/durability/kills.py` counts.

Every phase of the driver; `test_processes.py` kills with torch in the loop.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "durability" / "kills.py"


def kills(*args, timeout):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--seed", "0", "--json", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    print(f"{figures['kills']} kills of {figures['worlds']} runs in {figures['seconds']:.0f} s", figures["scenarios"])
    assert figures["wrong"] == []
    assert done.returncode == 0
    return figures


@pytest.mark.integration
def test_a_run_that_is_killed_anywhere_and_resumed_loses_and_doubles_nothing():
    """Every kind of run at least once, and two seconds of it."""
    figures = kills("--seconds", "2", "--worlds", "10", "--each", "3", "--workers", "1", timeout=280)
    assert figures["worlds"] >= 10
    assert figures["kills"] >= 10


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_ten_thousand_kills():
    figures = kills("--kills", "10000", "--workers", "2", timeout=7100)
    assert figures["kills"] >= 10_000
    assert len(figures["boundaries"]) >= 25
