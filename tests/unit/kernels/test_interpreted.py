"""Triton kernels, and layers and models over them, in Triton's interpreter, which is chosen before triton is imported.

One process runs several: most of the seconds of each would go into importing transformers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


SHORT = ("attention", "grouped", "linear", "model", "quantised", "rows", "layers Qwen3")
LONG = ("layers Llama Qwen2", "run")


@pytest.mark.parametrize("parts", [SHORT, pytest.param(LONG, marks=pytest.mark.nightly)], ids=["short", "long"])
def test_kernels_in_the_interpreter(parts, tmp_path):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # The interpreter's tl.dot is NumPy's; OpenBLAS for AVX2 adds up a row by its place in the tile, as no GPU does.
    environment |= {"OPENBLAS_CORETYPE": "Sandybridge"}
    command = [sys.executable, Path(__file__).with_name("interpreted.py"), *parts]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
