"""The invariant product, and a model that is trained and sampled with the same bits, in the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["linear", "model", pytest.param("run", marks=pytest.mark.nightly)])
def test_kernels_in_the_interpreter(name, tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, Path(__file__).with_name(f"interpreted_{name}.py"), tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
