"""Checksums on a GPU: the kernel, torch alone and SGLang's own function give the same; what they cost."""

import json
import os
import subprocess
import sys

import pytest
import torch

from slime_core.types import Piece, RankTensor
from slime_sglang import hashing
from slime_sglang.hashing import KINDS, checksum, expected

pytestmark = pytest.mark.gpu

SHAPES = [(1,), (3,), (8192,), (8193,), (2560,), (1000, 129), (6144, 2560), (151936, 256)]
DTYPES = [torch.float32, torch.bfloat16]
SGLANG = """
import json, sys, torch
try:
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash
except ImportError:
    from sglang.srt.layers.multimodal import gpu_tensor_hash
for shape, dtype, seed in json.load(sys.stdin):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).to(getattr(torch, dtype)).cuda()
    print(f"{gpu_tensor_hash(tensor):016x}")
"""


def drawn(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _cuda():
    assert torch.cuda.is_available()


def sglang_python():
    """Another environment's Python, or ours with SGLang's folder before it."""
    site = os.environ.get("SGLANG_SITE", "")
    python = os.environ.get("SLIME_SGLANG_PYTHON", "") or sys.executable
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH", ""))))
    found = subprocess.run(
        [python, "-c", "import sglang"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    if found.returncode:
        pytest.skip("not proven: SGLang is not installed where SGLANG_SITE or SLIME_SGLANG_PYTHON says")
    return python, {**os.environ, "PYTHONPATH": path}


def test_the_checksum_is_what_sglang_computes():
    """Its own function, in its own environment, over the same numbers."""
    python, env = sglang_python()
    whole = [(s, d) for s in SHAPES for d in DTYPES if len(s) == 1 or s[-1] * d.itemsize % 4 == 0]  # as 0.5.12 takes
    cases = [(shape, dtype, n) for n, (shape, dtype) in enumerate(whole)]
    asked = json.dumps([(shape, str(dtype).removeprefix("torch."), seed) for shape, dtype, seed in cases])
    done = subprocess.run(
        [python, "-c", SGLANG], env=env, input=asked, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [checksum(drawn(*case).cuda(), "murmur") for case in cases]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_and_torch_alone_agree(shape, dtype, monkeypatch):
    tensor = drawn(shape, dtype, 5)
    fast = checksum(tensor.cuda(), "murmur")
    assert fast == checksum(tensor, "murmur")  # on the CPU
    monkeypatch.setattr(hashing, "_adder", lambda device: hashing._add)
    assert fast == checksum(tensor.cuda(), "murmur")  # on the GPU, without triton


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_joined_pieces_have_the_checksum_of_the_joined_tensor(dtype):
    """Pieces end inside tiles, columns are no rows, and pad rows are zeros."""
    tensors = {
        name: drawn((rows, 96), torch.float32, rows).cuda() for name, rows in (("q", 100), ("k", 50), ("v", 51))
    }
    rows = [
        RankTensor(name="qkv", pieces=tuple(Piece(name=name) for name in "qkv")),
        RankTensor(name="columns", pieces=(Piece(name="q", dim=1, start=48, stop=96),)),
        RankTensor(name="padded", pieces=(Piece(name="k"), Piece(name="", stop=14))),
    ]
    whole = {
        "qkv": torch.cat(list(tensors.values())),
        "columns": tensors["q"][:, 48:],
        "padded": torch.cat([tensors["k"], torch.zeros(14, 96, device="cuda")]),
    }
    assert expected(tensors, rows, dtype, "murmur") == {
        name: checksum(tensor.to(dtype), "murmur") for name, tensor in whole.items()
    }


def test_what_hashing_4_gigabytes_takes(record_property):
    """64 tensors of bfloat16, the best of three; a figure, no limit: other work may run on the GPU."""
    tensors = [torch.empty(1 << 15, 1 << 10, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(64)]
    seconds, found = [], []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sums = KINDS["murmur"](torch.bfloat16)
        start.record()
        for n, tensor in enumerate(tensors):
            sums.add_row(str(n), [tensor])
        found.append(sums.finish())
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 64
    record_property("seconds", min(seconds))
    print(f"{min(seconds) * 1e3:.2f} ms for {sum(t.nbytes for t in tensors) / 1e9:.2f} GB")
