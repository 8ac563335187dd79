"""Runs that learn to carry, on a GPU, trained by Megatron-core and rolled out by SGLang: recipe, command, warm-up.

A warm-up imitates a pupil who loses carries (the embedded engine and FSDP make it, once); each run then goes on from it
with rewards alone, as tools/bench/make_bands.py has it. With SLIME_GPU_TESTS_DEVICE=cpu all of it is shorter, and learns less.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from served_recipe import toml

ROOT = Path(__file__).parents[4]
CPU = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda") == "cpu"

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
    **{"skip_server_warmup": True, "max_running_requests": 256, "max_total_tokens": 600_000},
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


def slime(folder, name, *flags, seconds=400):
    """`slime run` in a process of its own, which has so many seconds; its lines of metrics."""
    path = [str(ROOT / "plugins" / "slime_megatron" / "tests" / "megatron_on_cpu")] if CPU else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        **{"NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    }
    machine = [] if CPU else ["--device", "cuda", "--dtype", "bfloat16", "--cpu-threads", "4"]
    command = [sys.executable, "-m", "slime_cli.main", "run", "recipe.toml", "--run-dir", name, "--seed", "3"]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        try:
            ended = subprocess.run(
                [*command, *machine, *flags], cwd=folder, env=environment, stdout=out, stderr=out, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            ended = f"not ended after {seconds} s"
    assert ended == 0, f"{ended}\n{log.read_text(errors='replace')[-6000:]}{servers_said(folder / name)}"
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def servers_said(run_dir):
    """The ends of the logs of servers and ranks."""
    logs = sorted((run_dir / "log").glob("*-*.log"))
    return "".join(f"\n-- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def make_warm(folder, found):
    """Write the recipe and the model into a folder, and make ``warm/final`` there; ``found`` is where SGLang is."""
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
