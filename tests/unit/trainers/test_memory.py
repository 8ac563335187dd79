"""Memory that really runs out, under a limit of the process: what is told, and that nothing has changed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slime_core.errors import EngineError, TrainerError
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

LIMITED = """
import asyncio, json, os, resource, sys
import numpy as np, torch
torch.set_num_threads(1)

def limited(more):
    # the address space that there is, and so many bytes more
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more, resource.RLIM_INFINITY))

def free():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def in_process(source, *args):
    """Run it in a process of its own; the answer is the JSON that it prints."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    program = [sys.executable, "-c", LIMITED + textwrap.dedent(source), *map(str, args)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TRAIN = """
import trainer_bench as made
one = made.Bench(sys.argv[1], max_tokens_per_gpu=1 << 20, gradient_checkpointing=False, num_steps_per_rollout=1)
small = made.batch_of()
one.call("score", small, frozenset({"policy"}))
one.call("step", small)
big = made.batch_of(groups=12, rollouts=8, longest=300, fan_out=False)
before = one.parameters()

def packed(tokens):
    stage = one.worker.stage
    one.worker.stage = stage.model_copy(update={"train": stage.train.model_copy(update={"max_tokens_per_gpu": tokens})})

def asked(what):
    limited(24 << 20)
    try:
        one.call(*what)
        return None
    except Exception as error:
        return {"kind": type(error).__name__, **(error.as_dict() if hasattr(error, "as_dict") else {"what": str(error)})}
    finally:
        free()

failed = [asked(("step", big)), asked(("score", big, frozenset({"policy"})))]
same = all(torch.equal(before[name], tensor) for name, tensor in one.parameters().items())
left = sum(p.grad is not None for p in one.worker.policy.parameters())
packed(600)
again = asked(("step", big))
moved = any(not torch.equal(before[name], tensor) for name, tensor in one.parameters().items())
print(json.dumps({"failed": failed, "same": same, "left": left, "again": again, "moved": moved,
                  "tokens": len(big.tokens), "samples": len(big), "longest": int(big.lengths.max())}))
one.thread.close()
"""


@pytest.mark.nightly
def test_memory_that_runs_out_names_the_batch_the_largest_pass_and_the_keys_and_changes_nothing(tmp_path):
    """In training and in scoring; the same step is made in smaller passes within the same memory."""
    found = in_process(TRAIN, tiny_model(tmp_path / "model"))
    for error, what in zip(found["failed"], ("training on", "scoring"), strict=True):
        assert (error["kind"], error["code"]) == ("TrainerError", "TRN96"), error
        assert (
            f"memory ran out while {what} step 0: {found['tokens']} tokens of {found['samples']} samples"
            in error["what"]
        )
        assert "in 1 micro-batches, the largest of" in error["what"]
        assert "allocate" in error["why"]
        assert "the batch stays in the ledger" in error["why"]
        for key in ("train.max_tokens_per_gpu=", "train.logprob_chunk_tokens=", "train.gradient_checkpointing=true"):
            assert key in error["fix"]
        told = int(error["fix"].split("max_tokens_per_gpu=")[1].split()[0])
        assert found["longest"] <= told < found["tokens"]
        assert "slime run --resume" in error["fix"]
    assert found["same"], "no weight has changed"
    assert found["left"] == 0, "no gradient is left over for the next step"
    assert found["again"] is None, "smaller passes fit"
    assert found["moved"]


ENGINE = """
from slime_core.engines.local import LocalEngine
from slime_core.errors import SlimeError
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder
folder = ModelFolder.open(sys.argv[1])
thread = TorchThread(1)
tensors = folder.build_model("float32", 0).state_dict()
slots, context, limit = (int(word) for word in sys.argv[2:5])
engine = LocalEngine(folder, slots=slots, context_len=context, dtype="float32", device="cpu", thread=thread)

async def work():
    update = WeightUpdate(version=0, epoch=0, transport="tensors", tensors=tensors)
    await engine.load(update)
    ask = lambda n: engine.generate(GenerateRequest(id=str(n), tokens=[5] * (context - 8), seed=1,
                                                    params=SamplingParams(max_new_tokens=4)))
    limited(limit)
    done = await asyncio.gather(*(ask(n) for n in range(min(slots, 24))))
    return {"tokens": sum(len(one.tokens) for one in done), "sequences": engine._scheduler.sequences}

try:
    found = asyncio.run(work())
except SlimeError as error:
    found = {"kind": type(error).__name__, **error.as_dict()}
free()
print(json.dumps(found))
asyncio.run(engine.close())
thread.close()
"""


@pytest.mark.nightly
def test_an_engine_that_runs_out_of_memory_names_its_slots_and_their_length(tmp_path):
    """The embedded engine, with less memory than one sequence takes."""
    error = in_process(ENGINE, tiny_model(tmp_path / "model"), 8, 2048, 1 << 20)
    assert (error["kind"], error["code"]) == ("EngineError", "ENG05"), error
    assert "slots of " in error["what"]
    assert "rollout.rollout_slots=" in error["fix"]
    assert "rollout_max_response_len" in error["fix"]
    assert EngineError.exit_code == 5
    assert TrainerError.exit_code == 6


@pytest.mark.nightly
def test_an_engine_takes_as_many_slots_as_memory_holds(tmp_path):
    """512 slots of 2048 tokens are 2 GiB."""
    found = in_process(ENGINE, tiny_model(tmp_path / "model"), 512, 2048, 256 << 20)
    assert found["tokens"] == 24 * 4
    assert found["sequences"] < 512


FREED = """
import gc
from slime_core import memory
torch.ones(4 << 20)  # 16 MiB, mapped and unmapped: glibc takes smaller blocks from its heap from here on
blocks = [torch.ones(1 << 18) for _ in range(96)]
del blocks[::2]  # 48 MiB between others
gc.collect()
sizes = [memory.resident_memory()]
for memory.LARGE in (1 << 40, 0):
    memory.trim()
    sizes.append(memory.resident_memory())
print(json.dumps(sizes))
"""


def test_a_large_process_gives_freed_memory_back():
    before, small, large = in_process(FREED)
    assert before - small < 8 << 20
    assert small - large > 32 << 20
