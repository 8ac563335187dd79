"""Whole runs that Megatron-core trains and SGLang rolls out, and that learn to carry: on one GPU, and on two.

A warm-up imitates a pupil who loses carries (the embedded engine and FSDP make it, once); each run then goes on from it
with rewards alone, as tools/make_bands.py has it. Layouts are those that the cluster of one machine can place: with
two trainer ranks the servers share their GPUs, one on the first or one on both. Servers of one GPU each beside two
ranks need a trainer's handle on every GPU; they are not here.

SLIME_GPU_TESTS_DEVICE=cpu tries the first layout on a CPU, on Megatron's CPU ranks, shorter: it learns less there.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served_recipe import toml

ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
CPU = DEVICE == "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

MODEL = ROOT / "plugins" / "slime_rm_math" / "src" / "slime_rm_math" / "model"
SHAPE = {  # heads of a size for which SGLang's kernels on GPUs are made, that two ranks can share
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
}
TABLES = {
    "data": {"rollout_shuffle": True},
    "rollout": {"rollout_max_response_len": 4},
    "eval": {"eval_tasks": [{"name": "arithmetic_heldout"}]},
    "report": {"save_samples": 0},
    "plugin.rm_math": {
        **{"digits": 2, "operations": ["+"], "padded": True, "ones_first": True},
        **{"carry_lost": 0.65, "heldout": 0.1, "heldout_rows": 500},
    },
}
SERVER = {
    **{"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"},
    **{"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True, "mem_fraction_static": 0.3},
    **{"skip_server_warmup": True, "max_running_requests": 256},
}
WARMUP = [
    *('data.tasks=[{name = "arithmetic_pupil"}]', "--loss-type", "sft_loss", "--n-samples-per-prompt", "1"),
    *("--rollout-batch-size", "128", "--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "linear"),
    *("--lr-warmup-iters", "20", "--init-weights", "random", "--rollout-slots", "256", "--save-interval", "0"),
    *("--num-rollout", "20" if CPU else "200", "--skip-eval-before-train"),
]
STEPS = 3 if CPU else 40
LEARN = [
    *('data.tasks=[{name = "arithmetic"}]', "--num-rollout", str(STEPS), "--rollout-batch-size", "32"),
    *("--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2", "--lr", "3e-4", "--lr-warmup-iters", "6"),
    *("--eps-clip-high", "0.28", "--train-backend", "megatron", "--rollout-engine", "sglang"),
    *("--save-interval", str(STEPS // 2)),
]
LEARNT = 0.1  # held-out accuracy that a run must gain, as the bands of learning ask
BAND = 0.1  # mean difference of plain log-probs of both sides in bfloat16

ONE = ["--colocate"]
TWO = ["--actor-num-gpus-per-node", "2", "--colocate"]
LAYOUTS = {  # GPUs, flags, transport that carries the weights
    "one": (1, ONE, "tensor"),
    "tensor_parallel": (2, [*TWO, "--tensor-model-parallel-size", "2"], "tensor"),  # a server a GPU
    "pipeline": (2, [*TWO, "--pipeline-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"], "tensor"),
    "other_gpu": (2, ["--no-colocate", "--rollout-num-gpus", "1"], "nccl"),
}


def slime(folder, name, *flags):
    """`slime run` in a process of its own; its lines of metrics."""
    path = [str(ROOT / "tests" / "e2e" / "megatron_on_cpu")] if CPU else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        **{"NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    }
    machine = [] if CPU else ["--device", "cuda", "--dtype", "bfloat16", "--cpu-threads", "4"]
    command = [sys.executable, "-m", "slime_cli.main", "run", "recipe.toml", "--run-dir", name, "--seed", "3"]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, *machine, *flags], cwd=folder, env=environment, stdout=out, stderr=out, timeout=400
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:] + servers_said(folder / name)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def servers_said(run_dir):
    """The ends of the logs of servers and ranks."""
    logs = sorted((run_dir / "log").glob("*-*.log"))
    return "".join(f"\n-- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@pytest.fixture(scope="module")
def work(place, tmp_path_factory):
    """A folder with the recipe, the model, and ``warm/final`` of the warm-up."""
    _, found = place
    folder = tmp_path_factory.mktemp("learning")
    shutil.copytree(MODEL, folder / "model")
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, **SHAPE}))
    options = {"mem_fraction_static": 0.2, "max_total_tokens": 20000} if CPU else SERVER
    tables = {**TABLES, "sglang": {"python": found.python, "env": dict(found.env), **options}}
    lines = ['plugins = ["rm_math", "models"]']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    (folder / "recipe.toml").write_text("\n".join([*lines, ""]))
    slime(folder, "warm", *WARMUP, "--hf-checkpoint", "model")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_learns_from_what_sglang_rolls_out(work, layout):
    gpus, flags, transport = LAYOUTS[layout]
    if not CPU and torch.cuda.device_count() < gpus:
        pytest.skip(f"not proven: the layout {layout} needs {gpus} GPUs")
    if CPU and layout != "one":
        pytest.skip(f"not proven: the layout {layout} needs GPUs")
    rows = slime(work, layout, *LEARN, *flags, "--hf-checkpoint", "warm/final")
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
    assert list((work / layout / "checkpoints").glob("step-*"))
    assert (work / layout / "final" / "model.safetensors").is_file()
    if not CPU:  # there the warm-up is too short for right answers
        assert all(one["grad_norm"] > 0 for one in metrics)
        assert held[-1] >= held[0] + LEARNT, (held, [one["reward/mean"] for one in metrics])
        # the shared GPU's memory changed hands, or nothing did where each side has its own
        assert (metrics[-1].get("swap/engine_release_bytes", 0.0) > 5e9) == (transport == "tensor")
