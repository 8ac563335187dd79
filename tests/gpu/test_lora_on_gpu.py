"""Adapters on a GPU: layers written out against the family's own, the base held once, merged weights."""

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

import splits
import trainer_bench as made

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")
NEAR = {"float32": 1e-4, "bfloat16": 0.25}  # of a tensor's gradient, relative
WEIGHT = "model.layers.0.mlp.up_proj"


@pytest.fixture
def adapted(tmp_path):
    """Make a worker with adapters on the GPU: ``adapted(family, dtype, **train)``."""
    threads = []

    def make(family, dtype, **train):
        path = tmp_path / family
        if not path.exists():
            tiny_model(path, family, hidden=128) if family in ("llama", "qwen3") else family_model(path, family)
        config = made.config_of(path, **{"dtype": dtype, "lora_rank": 8, "kl_loss_coef": 0.1, **train})
        threads.append(thread := TorchThread(1))
        trainer = FsdpTrainer(config, load_plugins(config), ModelFolder.open(path), thread=thread, device=DEVICE)
        thread.call(trainer._worker.begin, config)
        thread.call(splits.fill_adapters, trainer._worker)
        return trainer._worker, thread.call

    yield make
    for thread in threads:
        thread.close()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_written_out_layers_with_adapters_have_the_families_own_gradients(adapted, family, dtype, recompute):
    worker, call = adapted(family, dtype, gradient_checkpointing=recompute, max_tokens_per_gpu=60)
    assert worker.policy.fused
    batch = splits.with_roles(made.batch_of())
    totals, grads = call(made.gradients_of, worker, batch, True)
    own_totals, own_grads = call(made.gradients_of, worker, batch, False)
    assert totals["loss"] == pytest.approx(own_totals["loss"], abs=NEAR[dtype] / 10)
    assert grads.keys() == own_grads.keys() == worker.policy.adapters.parameters().keys()
    whole = torch.stack([grad.norm() for grad in own_grads.values()]).norm()
    for name, grad in grads.items():
        apart = float((grad - own_grads[name]).norm() / own_grads[name].norm().clamp(min=whole / 50))
        assert apart < NEAR[dtype], (name, apart)


@pytest.mark.parametrize(
    ("family", "train"),
    [("qwen3", {}), ("qwen3", {"lora_dropout": 0.1, "lora_use_dora": True}), ("qwen3-moe", {}), ("gpt-oss", {})],
    ids=["plain", "dropout and DoRA", "experts", "transposed experts"],
)
def test_a_step_in_bfloat16_agrees_with_the_slow_way(adapted, family, train):
    worker, call = adapted(family, "bfloat16", **train)
    batch = made.batch_of()
    for role, columns in call(worker.score, batch, frozenset({"policy", "reference"})).items():
        batch.columns[role] = columns["log_probs"]
    report = call(worker.verify, batch)
    assert max(report["gradient_error"], report["loss_error"]) < report["limit"]
    assert torch.isfinite(torch.tensor(call(worker.step, batch)["grad_norm"]))


def test_the_base_is_held_once_and_an_engine_gets_it_merged(adapted):
    worker, call = adapted("qwen3", "bfloat16")
    base, factors = worker.policy.base(), worker.actor.locals()
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    tensors = call(worker.publish, 1).tensors
    delta = 4.0 * factors[f"{WEIGHT}.lora_B.default"] @ factors[f"{WEIGHT}.lora_A.default"]
    wanted = (base[f"{WEIGHT}.weight"].float() + delta).bfloat16()
    torch.testing.assert_close(tensors[f"{WEIGHT}.weight"], wanted, rtol=2**-7, atol=0)
    embedding = "model.embed_tokens.weight"
    assert tensors[embedding].data_ptr() == base[embedding].data_ptr()
