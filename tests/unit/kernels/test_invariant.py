"""The invariant product, and a model that is trained and sampled with the same bits, in the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["linear", "model"])
def test_kernels_in_the_interpreter(name):
    pytest.importorskip("triton")
    script = Path(__file__).with_name(f"interpreted_{name}.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
