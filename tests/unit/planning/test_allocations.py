"""Predicted bytes are those that trainers and engines hold: every tensor counted, full training and LoRA."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_bench as made
from pictures import arrays_of
from torch.autograd.graph import saved_tensors_hooks

from slime_core.engines.local import LocalEngine
from slime_core.media.features import features
from slime_core.planning.gpus import GIB, processor
from slime_core.planning.memory import MemoryPlan, fits
from slime_core.planning.sizes import ModelSizes
from slime_core.testing import tiny_model, tiny_vision_model
from slime_core.testing.families import family_config, family_model
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
SMOLLM2 = {
    "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "attention_bias": False,
}  # fmt: skip


def storages(*groups) -> int:
    """Bytes of the storages behind tensors, each once."""
    tensors = [tensor for group in groups for tensor in group]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_trainer(folder: Path, **train) -> None:
    """A trainer after a step holds what its plan says, component by component."""
    bench = made.Bench(folder, **train)
    try:
        plan = fits(bench.config, bench.folder.config, processor(8 * GIB))
        assert plan.trainer is not None
        expected = {name: size for moment in plan.trainer.moments for name, size in moment.bytes.items()}
        counted = held_bytes(bench)
        assert {name: expected.get(name, 0) for name in counted} == counted
    finally:
        bench.thread.close()


def held_bytes(bench: made.Bench) -> dict[str, int]:
    """Bytes of a trainer's components after a step."""
    worker = bench.worker
    bench.thread.call(worker.begin, bench.config)
    batch = made.batch_of()
    if "reference" in worker.plugins.needs(worker.train):
        batch.columns["reference"] = batch.columns["rollout_log_probs"]
    bench.thread.call(worker.step, batch)
    policy, actor = worker.policy, worker.actor
    found = {"optimizer": sum(state.nbytes for state in actor.states())}
    if policy.adapters is not None:
        found["adapters"] = sum(p.nbytes for p in policy.adapters.parameters().values())
        found["base"] = storages(policy.base().values())
    elif policy.masters is not None:
        found["parameters"] = storages(policy.masters.copies.values())
        found["masters"] = sum(policy.masters.weights[name].nbytes for name in policy.masters.copies)
    else:
        found["parameters"] = storages(policy.learning().values())
    if worker.frozen.teacher is not None:
        found["teacher"] = sum(p.nbytes for p in worker.frozen.teacher.parameters())
    found["reference"] = sum(t.nbytes for t in (worker.frozen.reference or {}).values())
    partition = worker.partitioner().partition_step(batch)[0]
    micros = worker.packs(partition)[0]
    sums = bench.thread.call(made_sums, worker, partition, micros)
    found["gradients"] = sum(grad.nbytes for grad in sums.values())
    return found


def made_sums(worker, partition, micros):
    from slime_core.trainers.optimizer_step import LossSums

    worker.run_backward(micros, LossSums(partition, worker.device))
    return worker.actor.gradients()


@pytest.mark.parametrize(
    ("family", "tied", "train"),
    [
        pytest.param("qwen3", True, {"dtype": "bfloat16", "kl_loss_coef": 0.1}, id="masters and a reference"),
        pytest.param("qwen2", False, {}, id="float32"),
        pytest.param("qwen3", False, {"dtype": "bfloat16"} | LORA, id="adapters"),
        pytest.param("qwen2", True, LORA | {"lora_target_modules": ["q_proj", "down_proj"]}, id="some layers"),
    ],
)
def test_a_trainer_holds_the_predicted_bytes(tmp_path: Path, family: str, tied: bool, train: dict) -> None:
    check_trainer(tiny_model(tmp_path / "model", family, tied=tied), **train)


def test_a_trainer_holds_a_teacher_of_another_shape_as_predicted(tmp_path: Path) -> None:
    teacher = tiny_model(tmp_path / "teacher", "llama", hidden=96)
    policy = tiny_model(tmp_path / "model")
    check_trainer(policy, dtype="bfloat16", opd_kl_coef=0.1, teacher_load=str(teacher))


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "learning"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_vision_model_holds_and_keeps_the_predicted_bytes(tmp_path: Path, family: str, freeze: bool) -> None:
    folder = tiny_vision_model(tmp_path / "model", family)
    check_trainer(folder, dtype="bfloat16", freeze_vision_tower=freeze)
    if not freeze:
        tower = ModelSizes.of(folder).tower
        assert tower is not None
        patches, size = kept_by_tower(folder, family)
        assert patches * tower.saved(2) == pytest.approx(size, rel=0.06)


def kept_by_tower(folder: Path, family: str) -> tuple[int, int]:
    """Patches of some pictures, and bytes that the tower's pass over them in bfloat16 keeps for the backward pass."""
    hf = ModelFolder.open(folder).build_model("bfloat16")
    count = 32
    sizes = [(1, 1)] * count if family == "smolvlm" else [(8, count // 8)]
    arrays = {
        name: torch.from_numpy(array) for name, array in arrays_of(family, np.random.default_rng(0), sizes).items()
    }
    arrays["pixel_values"] = arrays["pixel_values"].bfloat16()
    weights = {p.untyped_storage().data_ptr() for p in hf.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        features(hf, "images", arrays)
    pixels = arrays["pixel_values"]
    patches = count * (pixels.shape[-1] // 8) ** 2 if family == "smolvlm" else len(pixels)
    return patches, sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


@pytest.mark.nightly
@pytest.mark.parametrize("train", [{"dtype": "bfloat16"}, {"dtype": "bfloat16"} | LORA], ids=["full", "lora"])
def test_a_trainer_of_smollm2s_shape_holds_the_predicted_bytes(tmp_path: Path, train: dict) -> None:
    check_trainer(family_model(tmp_path / "model", "llama", **SMOLLM2), **train)


@pytest.mark.parametrize(("paged", "dtype"), [(True, "bfloat16"), (False, "float32")], ids=["pages", "slots"])
def test_a_cache_has_the_predicted_bytes(tmp_path: Path, paged: bool, dtype: str) -> None:
    from slime_core.planning.embedded import _pages, _slots_of

    folder, slots, tokens = ModelFolder.open(tiny_model(tmp_path / "model", "qwen3", tied=True)), 6, 40
    rollout = {"rollout_slots": slots, "rollout_max_context_len": 300, "rollout_max_response_len": 260}
    plan = fits(made.config_of(folder.path, dtype=dtype, rollout=rollout), folder.config, processor(8 * GIB))
    size, sequences, _, _ = (_pages if paged else _slots_of)(plan.subject, slots, 4 * GIB)
    assert sequences == slots
    assert cache_bytes(folder, paged, dtype, slots, tokens) == size


def cache_bytes(folder: ModelFolder, paged: bool, dtype: str, slots: int, prompt: int) -> int:
    """Bytes of an engine's keys and values once a request of the longest length has run."""

    async def generate() -> int:
        thread = TorchThread(1)
        engine = LocalEngine(
            folder, slots=slots, context_len=300, dtype=dtype, device="cpu", thread=thread, paged=paged
        )
        model = await thread.run(folder.build_model, dtype)
        await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(model.state_dict())))
        params = SamplingParams(max_new_tokens=300 - prompt, ignore_eos=True)
        requests = [GenerateRequest(id=str(n), tokens=[5] * prompt, params=params, seed=n) for n in range(slots)]
        await asyncio.gather(*map(engine.generate, requests))
        cache = engine._scheduler.served.cache
        size = storages(cache.keys, cache.values)
        await engine.close()
        thread.close()
        return size

    return asyncio.run(generate())


def test_bytes_of_adapters_are_part_of_the_plan() -> None:
    plans: dict[int, MemoryPlan] = {}
    for rank in (4, 8):
        config = made.config_of(Path("/"), dtype="bfloat16", lora_rank=rank, lora_sync="adapter")
        plans[rank] = fits(config, family_config("qwen3", 84), processor(8 * GIB))
    small, large = (plan.trainer.moments[0].bytes for plan in plans.values() if plan.trainer)
    assert large["adapters"] == 2 * small["adapters"]
    assert large["optimizer"] == 2 * large["adapters"]
    assert small["base"] == large["base"]
