"""Predicted memory: within 5 % of what GPUs were measured to have, and refused with a margin where it runs out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measured import QWEN3_4B, policy_step

from slime_core.config.schema import Config
from slime_core.planning.gpus import GIB, GPUS, gpu_of
from slime_core.planning.memory import fits, with_keys
from slime_core.planning.sizes import ModelSizes
from slime_core.testing import tiny_vision_model
from slime_core.testing.families import family_config
from slime_core.weights.build import skeleton

pytestmark = pytest.mark.unit
NUMBERS = 4022468096
"""Of QWEN3_4B: 36 layers of 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 and norms, and the embedding."""
ONE_LONG = ("--gradient-checkpointing", "--fsdp-cpu-offload", "--activation-offload")


@pytest.mark.parametrize(
    ("length", "sequences", "flags", "gib"),
    [
        pytest.param(8192, 4, (), 92, id="4 sequences of 8,192"),
        pytest.param(65536, 1, ONE_LONG, 30.4, id="one of 65,536, all recomputed, state and inputs on the host"),
    ],
)
def test_peak_of_a_policy_step_is_within_5_percent_of_the_measured(
    length: int, sequences: int, flags: tuple[str, ...], gib: float
) -> None:
    config, lengths = policy_step(length, sequences, *flags)
    (device,) = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths).devices
    assert device.peak.total / GIB == pytest.approx(gib, rel=0.05)


def test_a_step_of_92_gib_fits_an_h200_and_no_gpu_without_a_margin() -> None:
    config, lengths = policy_step(8192, 4)
    assert fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths).fits
    assert not fits(config, QWEN3_4B, gpu_of("h200=93"), lengths=lengths).fits
    short = fits(config, QWEN3_4B, gpu_of("h100"), lengths=lengths).short
    assert 10 * GIB < short < 25 * GIB


def test_a_stage_that_only_trains_has_the_gpus_of_the_others() -> None:
    rollout, stages = {"hf_checkpoint": "/", "rollout_max_response_len": 64}, [{"name": "rl"}]
    warmup = {"name": "warmup", "loss_type": "sft_loss"}
    run = Config.model_validate({"rollout": rollout, "stage": [warmup, *stages]})
    (device,) = fits(run, QWEN3_4B, gpu_of("h200")).devices
    assert (device.role, device.count) == ("trainer and engine", 1)


def test_a_plan_has_the_most_of_all_stages() -> None:
    """A stage of long responses without a reference, then one of short responses with it."""
    rollout = {"hf_checkpoint": "/", "rollout_slots": 16, "rollout_max_response_len": 8192}
    kl = {"name": "kl", "rollout_max_response_len": 512, "kl_loss_coef": 0.1}
    run = Config.model_validate({"rollout": rollout, "stage": [{"name": "long"}, kl]})
    plan = fits(run, QWEN3_4B, gpu_of("h200"))
    long, short = plan.stages
    numbers = ModelSizes.of(QWEN3_4B).parameters
    assert "reference" not in long.devices[0].phases["train"].bytes
    assert short.devices[0].phases["train"].bytes["reference"] == 4 * numbers
    (device,) = plan.devices
    assert device.phases["train"] == max((s.devices[0].phases["train"] for s in plan.stages), key=lambda m: m.total)
    assert device.phases["rollout"] == short.devices[0].phases["rollout"]  # pages of the first stage, and a reference
    position = 2 * 2 * 36 * 8 * 128
    pages = 16 * (256 + 8192 + 256) // 16 + 1  # slots of whole blocks of 256 positions, one more for what draws
    assert long.devices[0].phases["rollout"].bytes["KV cache"] == 16 * position * pages
    assert short.devices[0].phases["rollout"].bytes["KV cache"] == 16 * position * pages
    assert plan.short == max(stage.short for stage in plan.stages)


def test_an_offline_stage_has_the_engine_of_the_run() -> None:
    """The cache that stages before it made, and merged weights beside a base of few bits."""
    rollout = {"hf_checkpoint": "/", "rollout_slots": 16, "rollout_max_response_len": 8192}
    last, lora = {"name": "last", "loss_type": "sft_loss"}, {"lora_rank": 8, "base_weights": "nf4"}
    first = {**last, "name": "first"}
    run = Config.model_validate({"rollout": rollout, "train": lora, "stage": [first, {"name": "rl"}, last]})
    plan = fits(run, QWEN3_4B, gpu_of("h200"))
    before, rl, after = (stage.devices[0].phases["train"].bytes for stage in plan.stages)
    linear = 2 * 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728)
    assert before["engine weights"] == rl["engine weights"] == after["engine weights"] == linear
    assert after["KV cache"] == rl["KV cache"] > 16 * 8192 * 2 * 2 * 36 * 8 * 128
    assert not before.get("KV cache")
    assert all("engine passes" not in stage.devices[0].phases["rollout"].bytes for stage in plan.stages[::2])


@pytest.mark.parametrize(
    ("ranks", "place", "size"),
    [
        (1, "trainer", 2 * NUMBERS),
        (2, "trainer", NUMBERS),
        (1, "engine", 2 * (NUMBERS + 1024 * 2 * 36 * 1024)),  # with keys and values of its longest text
    ],
)
def test_a_teacher_has_its_weights(tmp_path: Path, ranks: int, place: str, size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    flags = ["--teacher-load", str(tmp_path), "--teacher-place", place, "--opd-kl-coef", "0.1"]
    config, lengths = policy_step(1024, 4, *flags, "--actor-num-gpus-per-node", str(ranks))
    config = with_keys(config, {"rollout.debug_train_only": False, "rollout.rollout_batch_size": 4})
    plan = fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths)
    assert {moment.bytes["teacher"] for moment in plan.devices[0].phases.values()} == {size}


@pytest.mark.parametrize("freeze", [True, False])
def test_a_pack_has_the_pictures_of_its_prompts(tmp_path: Path, freeze: bool) -> None:
    """4 patches of 3 * 2 * 14 * 14 pixels a token of a prompt of 64, and features of the text model's width."""
    folder = tiny_vision_model(tmp_path / "model", weights=False)
    config, lengths = policy_step(256, 1, "--freeze-vision-tower" if freeze else "--no-freeze-vision-tower")
    plan = fits(config, folder, gpu_of("h200"), lengths=lengths)
    held = 64 * (4 * 4 * 1176 + 2 * 64)
    kept = {moment.bytes.get("pictures") for moment in plan.trainer.moments if moment.phase == "train"}
    assert (held in kept) == freeze
    assert min(kept) == (held if freeze else held + 64 * 4 * plan.subject.sizes.tower.saved(2))
    assert max(kept) > min(kept)  # while the tower passes
    assert held in {moment.bytes.get("pictures") for moment in plan.trainer.moments if moment.phase == "score"}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3", "gemma2", "gpt-oss"])
def test_parameters_are_those_of_transformers_modules(name: str) -> None:
    config = family_config(name, 48)
    sizes = ModelSizes.of(config)
    named = {name: tuple(p.shape) for name, p in skeleton(config).named_parameters()}
    assert {weight.name: weight.shape for weight in sizes.weights} == named
    assert sizes.exact


def test_gpus_state_their_source_and_are_found_by_the_makers_names() -> None:
    assert all(gpu.source and gpu.memory > 20 * GIB for gpu in GPUS.values())
    assert gpu_of("NVIDIA GeForce RTX 4090") is gpu_of("4090")
    assert gpu_of("gpu=24").memory == 24 * GIB
