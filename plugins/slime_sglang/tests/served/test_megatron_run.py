"""`slime run` whose steps Megatron-core makes on two CPU ranks and whose rollouts SGLang's server makes.

Weights go by disk, as everywhere on a CPU. Tensor parallel: what is published is gathered from both ranks. The same on
GPUs is `tests/gpu/test_megatron_with_sglang_on_gpu.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean

import pytest
from raw_server import RawServer
from served_recipe import recipe
from served_run import TABLES, Driver, Work, is_settled

from durability.audit import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]  # the first test waits for the server too

ON_CPU = Path(__file__).parents[3] / "slime_megatron" / "tests" / "megatron_on_cpu"
TOKEN = "SLIME_SGLANG_TOKEN"
WARMUP, STEPS = 12, 15
STAGES = {
    "warmup": {"num_rollout": WARMUP, "rollout_batch_size": 64, "lr": 5e-3, "lr_warmup_iters": 4},
    "grpo": {"num_rollout": STEPS - WARMUP, "rollout_batch_size": 4, "lr": 1e-3, "entropy_coef": 0.01},
}
TAUGHT = 0.25  # mean reward of what the server makes after the warm-up; a fresh model's is 0


@pytest.fixture
def work(tmp_path: Path, served_model: Path) -> Work:
    found = Work(tmp_path / "work")
    found.temporary.mkdir(parents=True)
    tables = {
        **TABLES,
        "plugins": ["rm_math", "models"],
        "cluster": {"cpu_threads": 1, "actor_num_gpus_per_node": 2},  # device = cpu is refused with this backend
        "rollout": {**TABLES["rollout"], "rollout_max_response_len": 4, "hf_checkpoint": served_model},
        "train": {"dtype": "float32", "train_backend": "megatron"},
        "megatron": {"tensor_model_parallel_size": 2},
        "report": {"save_interval": 0},
        "plugin.rm_math": {"digits": 1, "carry_lost": 0.0},
        "sglang": {},
    }
    (found.folder / "recipe.toml").write_text(recipe(**STAGES, tables=tables))
    return found


@pytest.mark.nightly
def test_what_megatron_learns_is_what_sglang_serves(server: RawServer, work: Work, drivers: list[Driver]) -> None:
    path = os.pathsep.join([str(ON_CPU), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    token = server.server.address.token
    address = ("--rollout-external-engine-addrs", server.server.address.url)
    drivers.append(work.start(*address, **{TOKEN: token, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}))
    ended = drivers[-1].wait(280)
    assert ended.code == 0, ended.output[-6000:]
    assert (ended.left, ended.shared) == ({}, set())
    assert audit(work.run).wrong == []
    steps = {line["version"]: line["metrics"] for line in work.lines()}
    assert sorted(steps) == list(range(1, STEPS + 1))
    for version, metrics in steps.items():
        assert metrics["grad_norm"] > 0, version
        # every tensor of both ranks is there, and the server computes of them what Megatron does
        assert metrics["canary/tensors"] > 0, version
        assert metrics["canary/logprob_diff_mean"] < 1e-4, version
    served = [steps[version] for version in range(WARMUP + 1, STEPS + 1)]
    assert fmean(metrics["reward/mean"] for metrics in served) > TAUGHT, [m["reward/mean"] for m in served]
    assert (work.run / "final" / "model.safetensors").is_file()
    assert is_settled(server)
