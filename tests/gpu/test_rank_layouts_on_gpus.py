"""Ranks that share sequences, products or copies of the weights, on 2 and 4 GPUs over NCCL: the slow way's gradients.

python -m pytest -m gpu tests/gpu/test_rank_layouts_on_gpus.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parents[1] / "unit" / "trainers"
sys.path.append(str(HERE))

import splits  # noqa: E402
import trainer_bench as made  # noqa: E402

from slime_core.plugins import load_plugins  # noqa: E402
from slime_core.testing import tiny_model  # noqa: E402
from slime_core.threads import TorchThread  # noqa: E402
from slime_core.trainers.fsdp import FsdpTrainer  # noqa: E402
from slime_core.weights.folder import ModelFolder  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
LAYOUTS = {
    2: {
        "context": {"context_parallel_size": 2},
        "tensor": {"tensor_parallel_size": 2},
        "copies": {"fsdp_shard_size": 1},
    },
    4: {
        "context_of_4": {"context_parallel_size": 4},
        "context_and_copies": {"context_parallel_size": 2, "fsdp_shard_size": 2},
        "tensor_and_context": {"tensor_parallel_size": 2, "context_parallel_size": 2, "gradient_checkpointing": True},
        "tensor_and_shards": {"tensor_parallel_size": 2},
        "tensor_on_the_host": {"tensor_parallel_size": 2, "fsdp_cpu_offload": True},
    },
}
SETTINGS = ("clip", "gspo")
LIMITS = {"float32": 1e-3, "bfloat16": 0.25}  # `trainers.verify`


def verify_rank(folder, out, dtype, rank, world):
    """Compare each layout's gradients with the slow way's; a save that is restored has the same checksum."""
    thread = TorchThread(1)
    for layout, sizes in LAYOUTS[world].items():
        for setting in SETTINGS:
            train = {**splits.SETTINGS[setting], **sizes, "dtype": dtype, "compile": "off"}
            config = made.config_of(folder, max_tokens_per_gpu=60, **train)
            trainer = FsdpTrainer(
                config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
                device=DEVICE, rendezvous=Path(out) / "meet",
            )  # fmt: skip
            worker = trainer._worker
            thread.call(worker.begin, config)
            batch = splits.with_roles(made.batch_of(groups=3, rollouts=4, longest=30))
            report = thread.call(worker.verify, batch)
            thread.call(worker.step, batch)
            thread.call(worker.save, Path(out) / f"{dtype}-{layout}-{setting}")
            worker.staging.wait()
            thread.call(worker.barrier)
            saved = thread.call(worker.fingerprint)
            thread.call(worker.step, batch)
            thread.call(worker.restore, Path(out) / f"{dtype}-{layout}-{setting}")
            same = thread.call(worker.fingerprint) == saved
            if rank == 0:
                print(json.dumps([layout, setting, report["gradient_error"], report["loss_error"], same]), flush=True)
    thread.close()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_have_the_slow_ways_gradients_and_resume(tmp_path, world, dtype):
    if DEVICE == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"not proven: {world} GPUs are needed")
    folder = tiny_model(tmp_path / "model", hidden=256, tied=True)
    command = [sys.executable, __file__, str(folder), str(tmp_path), dtype]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=280) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), [text[-3000:] for _, text in outputs]
    rows = [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("[")]
    print(*rows, sep="\n")
    assert len(rows) == len(LAYOUTS[world]) * len(SETTINGS)
    assert [row for row in rows if max(row[2:4]) > LIMITS[dtype] or not row[4]] == []


if __name__ == "__main__":
    verify_rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
