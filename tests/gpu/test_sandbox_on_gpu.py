"""The sandbox where candidates use a GPU: CUDA works inside every layer, and the one that hangs it is ended."""

import asyncio
import subprocess
from types import SimpleNamespace

import pytest

from slime_sandbox import Limits, Policy, Sandbox

pytestmark = pytest.mark.gpu

ENTRY = "sandbox_entries:run_source"
LIMITS = Limits(wall_seconds=120.0, memory_bytes=8 << 30, disk_bytes=1 << 30, processes=512, open_files=1024)
KERNEL = """
import importlib.util, torch, triton
source = '''
import triton
import triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

@triton.jit
def spin(x, n):
    i = tl.load(x) * 0
    while i >= 0:
        i = tl.load(x, volatile=True) * 0
        tl.store(x, i)
'''
with open('kernel.py', 'w') as file:
    file.write(source)
spec = importlib.util.spec_from_file_location('kernel', 'kernel.py')
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
HONEST = f"""{KERNEL}
x = torch.randn(1000, device='cuda')
y = torch.empty_like(x)
kernel.double[(8,)](x, y, 1000, BLOCK=128)
torch.cuda.synchronize()
product = torch.eye(64, device='cuda') @ torch.ones(64, 64, device='cuda')
answer = repr((bool(torch.equal(y, 2 * x)), float(product.sum()), torch.cuda.device_count())).encode()
"""
WELL = b"(True, 4096.0, 1)"


def uuids():
    """Of this machine's GPUs, asked without CUDA in this process."""
    said = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True)
    return said.stdout.split()


@pytest.fixture(scope="module")
def gpus():
    """``candidate(source, gpu)`` in a sandbox with torch and triton warm, and the GPU's UUID."""
    (first, *_) = uuids()
    with asyncio.Runner() as runner:
        policy = Policy(gpu=True)
        box = runner.run(Sandbox.open(policy, preload=("torch", "triton", "triton.language", "sandbox_entries")))
        print("level", box.level, "missing", box.missing, "groups", box.groups is not None)

        def candidate(source, gpu=first, limits=LIMITS):
            return runner.run(box.run(ENTRY, source.encode(), limits, gpu=gpu))

        yield SimpleNamespace(box=box, candidate=candidate, uuid=first, run=runner.run)
        runner.run(box.aclose())


def test_cuda_and_triton_work_inside_every_layer(gpus):
    outcome = gpus.candidate(HONEST)
    assert (outcome.status, outcome.result) == ("ok", WELL), outcome
    assert outcome.violations == {}
    assert outcome.layers == gpus.box.layers
    print("seconds", outcome.seconds, "level", outcome.level)


def test_the_fork_server_has_not_touched_cuda(gpus):
    """A process that has cannot be forked."""
    outcome = gpus.candidate("import torch\nanswer = repr(torch.cuda.is_initialized()).encode()")
    assert outcome.result == b"False"


def test_a_candidate_without_a_gpu_has_none_whatever_it_says(gpus):
    source = (
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch\nanswer = repr(torch.cuda.is_available()).encode()"
    )
    outcome = gpus.candidate(source, gpu=None)
    assert outcome.result == b"False", outcome


def test_a_kernel_that_never_ends_is_ended_and_the_gpu_is_well(gpus):
    source = f"{KERNEL}\nx = torch.ones(1, dtype=torch.int32, device='cuda')\nkernel.spin[(1,)](x, 1)\ntorch.cuda.synchronize()"
    outcome = gpus.candidate(source, limits=Limits(wall_seconds=30.0, processes=512, open_files=1024))
    assert outcome.status == "timeout", outcome
    assert gpus.candidate(HONEST).result == WELL


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(0)", "import ctypes; ctypes.string_at(0)"])
def test_a_candidate_that_dies_with_the_gpu_in_use_leaves_it_well(gpus, end):
    outcome = gpus.candidate(f"{HONEST}\nheld = torch.empty(1 << 30, device='cuda')\n{end}")
    assert outcome.status == "died", outcome
    assert gpus.candidate(HONEST).result == WELL


def test_two_at_a_time_share_it(gpus):
    async def both():
        return await asyncio.gather(*(gpus.box.run(ENTRY, HONEST.encode(), LIMITS, gpu=gpus.uuid) for _ in range(2)))

    assert [outcome.result for outcome in gpus.run(both())] == [WELL, WELL]


def test_memory_of_the_host_is_bounded_though_its_address_space_is_not(gpus):
    source = "import torch\ntorch.ones(1, device='cuda')\nheld = bytearray(os.urandom(1 << 20) * (3 << 10))\nwhile True: pass"
    small = Limits(wall_seconds=60.0, memory_bytes=2 << 30, processes=512, open_files=1024)
    outcome = gpus.candidate(source, limits=small)
    assert outcome.status == "memory", outcome


def test_only_the_named_gpus_device_file_can_be_opened(gpus):
    source = """
found = []
for n in range(16):
    try:
        os.close(os.open(f'/dev/nvidia{n}', os.O_RDWR)); found.append(n)
    except OSError: pass
answer = repr(found).encode()
"""
    seen = len(eval(gpus.candidate(source).result))  # noqa: S307
    assert seen == 1 or len(uuids()) == 1
