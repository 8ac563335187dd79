"""The invariant product: the Triton kernel in the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted_linear.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
