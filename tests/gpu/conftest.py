"""A real SGLang server on the GPU, started once; engines of several transports are attached to it.

Needs what tools/gpu/sglang.sh sets up: SGLang in $SGLANG_SITE. Without it these tests are named as not proven.
SLIME_GPU_TESTS_DEVICE=cpu tries the tests themselves on a CPU with a tiny model: those of seeds and memory fail there.
"""

import asyncio
import importlib.util
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from carry_runs import make_warm

TOOLS = Path(__file__).parents[2] / "tools" / "bench"
DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
FLAGS = (
    *("--rollout-max-response-len", "64", "--save-interval", "0"),
    *(("--dtype", "bfloat16", "--rollout-deterministic") if DEVICE == "cuda" else ("--dtype", "float32")),
)
OPTIONS = {
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_running_requests": 128,
}
"""A start costs 78 s with these, 124 s with CUDA graphs; what graphs change is seen by tools/bench/bench_rollout.py."""


@pytest.fixture(scope="session")
def place():
    """Where SGLang is, and the benchmarks' way to start it."""
    name = "sglang_place"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    found = module.Place.find(DEVICE) if DEVICE == "cpu" or torch.cuda.is_available() else None
    if found is None:
        pytest.skip("not proven: SGLang is not installed where SGLANG_SITE or SLIME_SGLANG_PYTHON says")
    return module, found


@pytest.fixture(scope="session")
def loop():
    """One event loop for all tests: an engine's connections belong to the loop that opened them."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def shape():
    """The model's shape."""
    return "0.6B" if DEVICE == "cuda" else "tiny"


@pytest.fixture(scope="session")
def folder(place, shape, tmp_path_factory):
    """A model folder of a seed."""
    module, _ = place
    return module.make_folder(tmp_path_factory.mktemp("sglang") / "model", shape)


@pytest.fixture(scope="session")
def served(place, folder, loop):
    """The engine over a server of ours, deterministic and able to give memory back, before its first load."""
    module, found = place
    config = found.config(folder, *FLAGS, sglang=OPTIONS if DEVICE == "cuda" else None)
    stack = AsyncExitStack()
    one = loop.run(stack.enter_async_context(module.serving(config, folder.parent / "run")))
    if DEVICE == "cpu":  # its server answers these calls too, and gives nothing
        one.engine._settings = replace(one.engine._settings, memory_saver=True)
    yield one
    loop.run(stack.aclose())


@pytest.fixture(scope="session")
def warmed(place, tmp_path_factory):
    """A folder with the recipe of `carry_runs`, the model, and ``warm/final`` of the warm-up."""
    _, found = place
    folder = tmp_path_factory.mktemp("learning")
    make_warm(folder, found)
    return folder
