"""The Triton kernels in Triton's interpreter, which is chosen before triton is imported: in one process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


def test_triton_kernels_agree_with_their_references():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted.py")
    paths = os.pathsep.join([*sys.path, str(script.parent)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all agree" in done.stdout
