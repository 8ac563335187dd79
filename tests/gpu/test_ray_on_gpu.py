"""Whole runs on a Ray cluster of this machine that learn to carry: Megatron's ranks and SGLang's servers, each in the
seat that Ray gives it, on two GPUs and on four.

Recipe, warm-up and what must be learnt are those of `carry_runs`, as on one machine. Which way the weights go
follows from placement alone: from memory to memory where servers share the ranks' GPUs, by NCCL where they do not.
SLIME_GPU_TESTS_DEVICE=cpu tries the smallest layout on a CPU, by disk.
"""

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import pytest
import torch
from carry_runs import BAND, CPU, LEARN, LEARNT, STEPS, slime

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

RAY = ["--cluster", "ray", "--ray-address", "local"]
TP = ["--tensor-model-parallel-size", "2"]
LAYOUTS = {  # GPUs, flags, transport that carries the weights, servers
    "colocated_two": (2, ["--actor-num-gpus-per-node", "2", *TP, "--colocate"], "tensor", 2),
    "apart_two": (2, ["--no-colocate", "--rollout-num-gpus", "1"], "nccl", 1),
    "colocated_four": (
        4,
        ["--actor-num-gpus-per-node", "4", *TP, "--colocate", "--rollout-num-gpus-per-engine", "2"],
        "tensor",
        2,
    ),
    "apart_four": (
        4,
        ["--actor-num-gpus-per-node", "2", *TP, "--no-colocate", "--rollout-num-gpus", "2"],
        "nccl",
        2,
    ),
}


@pytest.fixture
def short():
    """Ray's sockets lie in the folder for temporary files, and their names are short."""
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ["TMPDIR"] = folder
    yield
    os.environ.pop("TMPDIR")
    if before is not None:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ray_places_ranks_and_servers_and_the_run_learns(warmed, layout, short):
    gpus, flags, transport, servers = LAYOUTS[layout]
    if not CPU and torch.cuda.device_count() < gpus:
        pytest.skip(f"not proven: the layout {layout} needs {gpus} GPUs")
    if CPU and layout != "apart_two":
        pytest.skip(f"not proven: the layout {layout} needs GPUs")
    rows = slime(warmed, f"ray_{layout}", *LEARN, *flags, *RAY, "--hf-checkpoint", "warm/final")
    said = (warmed / f"ray_{layout}.log").read_text(errors="replace")
    steps = [row for row in rows if row["kind"] == "step"]
    held = [row["metrics"]["reward/mean"] for row in rows if row["kind"] == "eval"]
    metrics = [step["metrics"] for step in steps]
    middle = {name: statistics.median(one["seconds"].get(name, 0.0) for one in steps) for name in steps[0]["seconds"]}
    apart = max(one["canary/logprob_diff_mean"] for one in metrics)
    print(f"== ray, {layout}, {transport}: held-out {held[0]:.3f} to {held[-1]:.3f} in {STEPS} steps")
    print(f"   log-probs differ by {apart:.2g}; {json.dumps({n: round(v, 3) for n, v in middle.items()})}")
    assert f"{servers} engine(s)" in said
    assert len(steps) == STEPS
    assert all(one["canary/tensors"] > 0 for one in metrics)
    assert apart < BAND
    run = Path(warmed / f"ray_{layout}")
    assert (run / "final" / "model.safetensors").is_file()
    assert not list((run / "weights").glob("v-*")) or CPU, "the weights went through a folder"
    if not CPU:  # there the warm-up is too short for right answers
        assert all(one["grad_norm"] > 0 for one in metrics)
        assert held[-1] >= held[0] + LEARNT, (held, [one["reward/mean"] for one in metrics])
        # memory changed hands on the shared GPUs, or each side had its own
        assert ("swap/engine_release_seconds" in metrics[-1]) == (transport == "tensor")
