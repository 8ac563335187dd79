"""Layers written out for a GPU against the model's own there: packs with shared prompts, one rank in each dtype."""

import os
import sys
from pathlib import Path

import pytest
import torch

from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.testing.families import family_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder

sys.path.append(str(Path(__file__).parents[1] / "unit" / "trainers"))

import trainer_bench as made

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
NEAR = {"float32": 1e-4, "bfloat16": 5e-2}  # of a tensor's gradient, relative


@pytest.fixture
def gpu_trainer(tmp_path):
    """Make a worker on the GPU: ``gpu_trainer(family, dtype, **train)``."""
    threads = []

    def make(family, dtype, **train):
        path = tmp_path / family
        if family == "mistral":
            family_model(path, family)
        elif not path.exists():
            tiny_model(path, family, hidden=128, tied=True)
        folder = ModelFolder.open(path)
        config, thread = made.config_of(folder.path, dtype=dtype, **train), TorchThread(1)
        threads.append(thread)
        trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device=DEVICE)
        thread.call(trainer._worker.begin, config)
        return trainer._worker, thread.call

    yield make
    for thread in threads:
        thread.close()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tokens", [0, 60])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_written_out_layers_have_the_models_own_loss_and_gradients(gpu_trainer, family, dtype, tokens, recompute):
    worker, call = gpu_trainer(family, dtype, max_tokens_per_gpu=tokens, gradient_checkpointing=recompute)
    assert worker.policy.fused
    batch = made.batch_of()
    totals, grads = call(made.gradients_of, worker, batch, True)
    own_totals, own_grads = call(made.gradients_of, worker, batch, False)
    assert totals["loss"] == pytest.approx(own_totals["loss"], abs=NEAR[dtype] / 10)
    assert list(grads) == list(own_grads)
    whole = torch.stack([grad.norm() for grad in own_grads.values()]).norm()  # that of a key's bias is noise around 0
    for name, grad in grads.items():
        apart = float((grad - own_grads[name]).norm() / own_grads[name].norm().clamp(min=whole / 50))
        assert apart < NEAR[dtype], (name, apart)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_in_bfloat16_follow_those_in_float32_and_the_copy_follows_its_masters(gpu_trainer, family):
    batch, norms = made.batch_of(), {}
    for dtype in ("float32", "bfloat16"):
        worker, call = gpu_trainer(family, dtype)
        norms[dtype] = [call(worker.step, batch)["grad_norm"] for _ in range(4)]
        tensors = call(worker.publish, 1).tensors
        for name, master in worker.actor.locals().items():
            assert torch.equal(tensors[name], master.to(getattr(torch, dtype)))
    assert norms["float32"][0] != pytest.approx(norms["float32"][-1], rel=0.01)
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.05)
