"""Whole runs that Megatron-core trains and SGLang rolls out, and that learn to carry: on one GPU, and on two.

Each run goes on from the warm-up of `carry_runs`. Layouts are those that the cluster of one machine can place: with
two trainer ranks the servers share their GPUs, one on the first or one on both. Servers of one GPU each beside two
ranks need a trainer's handle on every GPU; they are not here.

SLIME_GPU_TESTS_DEVICE=cpu tries the first layout on a CPU, on Megatron's CPU ranks, shorter: it learns less there.
"""

import json
import statistics

import pytest
import torch
from carry_runs import BAND, CPU, LEARN, LEARNT, STEPS, slime

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

ONE = ["--colocate"]
TWO = ["--actor-num-gpus-per-node", "2", "--colocate"]
LAYOUTS = {  # GPUs, flags, transport that carries the weights
    "one": (1, ONE, "tensor"),
    "tensor_parallel": (2, [*TWO, "--tensor-model-parallel-size", "2"], "tensor"),  # a server a GPU
    "pipeline": (2, [*TWO, "--pipeline-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"], "tensor"),
    "other_gpu": (2, ["--no-colocate", "--rollout-num-gpus", "1"], "nccl"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_learns_from_what_sglang_rolls_out(warmed, layout):
    gpus, flags, transport = LAYOUTS[layout]
    if not CPU and torch.cuda.device_count() < gpus:
        pytest.skip(f"not proven: the layout {layout} needs {gpus} GPUs")
    if CPU and layout != "one":
        pytest.skip(f"not proven: the layout {layout} needs GPUs")
    rows = slime(warmed, layout, *LEARN, *flags, "--hf-checkpoint", "warm/final")
    steps = [row for row in rows if row["kind"] == "step"]
    held = [row["metrics"]["reward/mean"] for row in rows if row["kind"] == "eval"]
    metrics = [step["metrics"] for step in steps]
    middle = {name: statistics.median(one["seconds"].get(name, 0.0) for one in steps) for name in steps[0]["seconds"]}
    swap = {n: round(v, 4) for n, v in metrics[-1].items() if n.startswith("swap/")}
    apart = max(one["canary/logprob_diff_mean"] for one in metrics)
    print(f"== megatron and sglang, {layout}, {transport}: held-out {held[0]:.3f} to {held[-1]:.3f} in {STEPS} steps")
    print(f"   log-probs differ by {apart:.2g}; {json.dumps({n: round(v, 3) for n, v in middle.items()})}")
    print(f"   {json.dumps(swap)}")
    assert len(steps) == STEPS
    assert all(one["canary/tensors"] > 0 for one in metrics)
    assert apart < BAND
    assert list((warmed / layout / "checkpoints").glob("step-*"))
    assert (warmed / layout / "final" / "model.safetensors").is_file()
    if not CPU:  # there the warm-up is too short for right answers
        assert all(one["grad_norm"] > 0 for one in metrics)
        assert held[-1] >= held[0] + LEARNT, (held, [one["reward/mean"] for one in metrics])
        # the shared GPU's memory changed hands, or nothing did where each side has its own
        assert (metrics[-1].get("swap/engine_release_bytes", 0.0) > 5e9) == (transport == "tensor")
