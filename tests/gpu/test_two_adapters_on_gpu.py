"""Two adapters in one run on a GPU, base in bfloat16: each learns, log-probs of both sides agree, a step is made again.

SLIME_GPU_TESTS_DEVICE=cpu tries it on a CPU.
"""

import json
import os
import subprocess
import sys

import pytest
from carry_runs import BAND, CPU, ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
MACHINE = [] if CPU else ["--device", "cuda", "--dtype", "bfloat16", "--cpu-threads", "4"]
NAMES = ("up", "down")


def slime(folder, *words):
    """`slime ARGS` in a process of its own."""
    command = [sys.executable, "-m", "slime_cli.main", *words]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_two_agents_learn_opposite_jobs(tmp_path):
    learn_opposite_jobs(tmp_path)


def learn_opposite_jobs(tmp_path, *words):
    """Run the example, with flags, and a step of it again."""
    recipe = str(ROOT / "examples" / "two_adapters" / "recipe.toml")
    slime(tmp_path, "run", recipe, "--run-dir", "run", "--save-interval", "10", "--verify-step", "2", *MACHINE, *words)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row["kind"] == "step"]
    print({name: steps[-1][name] for name in ("up/reward/mean", "down/reward/mean", "up/loss", "down/grad_norm")})
    assert steps[-1]["up/reward/mean"] > 0.8
    assert steps[-1]["down/reward/mean"] > 0.6
    assert all(step[f"{name}/train_rollout_logprob_abs_diff"] < BAND for step in steps for name in NAMES)
    assert steps[1]["verify/ok"] == 1.0
    slime(tmp_path, "replay", "run", "--step", "12")
