"""Settings that are left to auto: the fastest that fit, the same on every run, and what a config says stays."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
from measured import policy_step

from slime_core.config.dump import to_toml
from slime_core.config.rules import conflicts
from slime_core.config.schema import Config
from slime_core.planning import automatic
from slime_core.planning.footprint import Lengths
from slime_core.planning.gpus import GIB, gpu_of, processor
from slime_core.planning.memory import fits, with_keys
from slime_core.planning.time import TimePlan
from slime_core.testing.models import tiny_model

pytestmark = pytest.mark.unit

WIDE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Qwen3-1.7B's shape, without weights."""
    import json

    path = tiny_model(tmp_path_factory.mktemp("model") / "m", weights=False, tied=True, context_len=8192)
    config = json.loads((path / "config.json").read_bytes()) | WIDE
    config |= {"layer_types": ["full_attention"] * WIDE["num_hidden_layers"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(folder: Path, **train: object) -> Config:
    rollout = {"hf_checkpoint": str(folder), "rollout_max_response_len": 2048, "rollout_max_context_len": 4096}
    return Config.model_validate({"rollout": rollout, "train": train})


def test_a_large_gpu_leaves_all_as_it_is_and_a_small_one_gets_the_first_settings_that_fit(folder: Path) -> None:
    large, line = automatic.with_plan(config_of(folder), gpu_of("h200"))
    assert (large.train.gradient_checkpointing, large.train.fsdp_cpu_offload) == (False, False)
    assert large.train.max_tokens_per_gpu == 0
    assert line.startswith("auto: micro-batches of ")
    assert "missing" not in line

    config = config_of(folder)
    small, line = automatic.with_plan(config, gpu_of("4090"))
    assert small.train.fsdp_cpu_offload is True
    assert "fsdp_cpu_offload = true" in line
    assert "without" in line
    assert fits(small, folder, gpu_of("4090")).fits
    assert automatic.with_plan(config, gpu_of("4090")) == (small, line)

    again, _ = automatic.with_plan(small, gpu_of("h200"))
    assert again == small  # what was chosen is what a resume is told
    limited = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu_memory_limit": 23.5})})
    assert automatic.with_plan(limited, gpu_of("h200"))[0].train == small.train


def test_the_choice_is_the_fastest_of_all_combinations_of_switches(folder: Path) -> None:
    """State may wait in main memory while layers keep their activations."""
    config, gpu = config_of(folder, lora_rank=0), gpu_of("gpu=40")
    chosen, _ = automatic.with_plan(config, gpu)
    seconds = {}
    for switches in product((False, True), repeat=2):
        keys = dict(zip(("gradient_checkpointing", "fsdp_cpu_offload"), switches, strict=True))
        plan = fits(automatic.with_plan(config_of(folder, **keys), gpu)[0], folder, gpu)
        time = TimePlan.of(plan)
        seconds[switches] = time.total if plan.fits and time is not None else math.inf
    picked = (chosen.train.gradient_checkpointing, chosen.train.fsdp_cpu_offload)
    assert picked == (False, True)
    assert seconds[picked] <= 1.01 * min(seconds.values())
    assert math.isfinite(seconds[True, False])
    (short, _), (ample, _) = (automatic.with_plan(config, gpu, main_memory=size * GIB) for size in (16, 64))
    assert (short.train.gradient_checkpointing, short.train.fsdp_cpu_offload) == (True, False)
    assert ample == chosen


def test_what_a_config_says_stays_and_a_plan_that_does_not_fit_says_so(folder: Path) -> None:
    config = config_of(folder, gradient_checkpointing=False, fsdp_cpu_offload=False, max_tokens_per_gpu=8192)
    config = with_keys(config, {"rollout.rollout_slots": 100})
    assert automatic.with_plan(config, gpu_of("4090")) == (config, "")
    config = config_of(folder, fsdp_cpu_offload=False)
    same, line = automatic.with_plan(config, gpu_of("4090"))
    assert same.train.fsdp_cpu_offload is False
    assert "GiB are missing all the same" in line
    nowhere, line = automatic.with_plan(config_of(folder / "absent"), gpu_of("4090"))
    assert (nowhere.train.gradient_checkpointing, line) == (False, "")


@pytest.mark.parametrize("train", [{"train_backend": "megatron"}, {"optimizer": "paged_adamw_8bit"}])
def test_a_switch_that_the_rest_of_the_config_refuses_is_not_chosen(folder: Path, train: dict[str, object]) -> None:
    chosen, line = automatic.with_plan(config_of(folder, **train), gpu_of("l4=6"))
    assert (chosen.train.gradient_checkpointing, chosen.train.fsdp_cpu_offload) == (True, False)
    assert "GiB are missing all the same" in line
    assert not conflicts(chosen)


def test_slots_follow_from_the_config_the_memory_and_the_lengths(folder: Path) -> None:
    """What the cache holds, by hand: half of what a GPU leaves beside a base of 2 bytes and float32 adapters."""
    config = config_of(folder, lora_rank=32)
    large, line = automatic.with_plan(config, gpu_of("h200"))
    assert large.rollout.rollout_slots == 256  # 32 prompts of 8 samples
    assert "256 sequences at once (a step's samples, 64 to 1,024)" in line

    small, line = automatic.with_plan(config, gpu_of("4090"))
    width, inner, vocab, layers = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["vocab_size"], 28
    rows = [(width, width), (width, width // 2), (width, width // 2), (width, width)]  # queries, keys, values, output
    rows += [(width, inner), (width, inner), (inner, width)]
    base = layers * (sum(a * b for a, b in rows) + 2 * width + 2 * 128) + vocab * width + width
    adapters = layers * sum(32 * (a + b) for a, b in rows)
    merged = layers * sum(a * b for a, b in rows)  # the engine's copy of what adapters change
    room = gpu_of("4090").memory - (640 << 20) - 2 * base - 4 * adapters - 2 * merged
    positions = room / 2 / (2 * layers * 2 * 8 * 128)
    assert small.rollout.rollout_slots == int(positions / (256 + 2048 / 4))
    assert f"{small.rollout.rollout_slots} sequences at once (the cache holds no more)" in line
    assert automatic.with_plan(config, gpu_of("4090")) == (small, line)
    assert automatic.with_plan(small, gpu_of("h200"))[0] == small  # as a resume reads it

    short = Lengths(prompt=256, response=200, longest=2304, p95=300, source="measured")
    assert automatic.with_plan(config, gpu_of("4090"), lambda *_: short)[0].rollout.rollout_slots == int(
        positions / 356
    )

    on_processor, line = automatic.with_plan(config, processor(400 * GIB))
    assert on_processor.rollout.rollout_slots == 64
    assert line.startswith("auto: 64 sequences at once (as on any processor)")
    tight, line = automatic.with_plan(config, processor(20 * GIB))
    assert 1 < tight.rollout.rollout_slots < 64
    served = with_keys(config, {"rollout.rollout_engine": "sglang"})
    assert automatic.with_plan(served, gpu_of("h200"))[0].rollout.rollout_slots == 0


def test_slots_shrink_where_a_step_does_not_fit_otherwise(folder: Path) -> None:
    switches = {"gradient_checkpointing": False, "fsdp_cpu_offload": False, "max_tokens_per_gpu": 8192}
    gpu = gpu_of("4090")
    chosen, line = automatic.with_plan(config_of(folder, lora_rank=32, **switches), gpu)
    slots = chosen.rollout.rollout_slots
    assert f"{slots} sequences at once (more do not fit)" in line
    assert fits(chosen, folder, gpu).fits
    assert not fits(with_keys(chosen, {"rollout.rollout_slots": slots + 1}), folder, gpu).fits


def test_auto_is_written_and_read() -> None:
    config = Config.model_validate({"train": {"gradient_checkpointing": "auto"}})
    assert config == Config()
    text = to_toml(config)
    assert 'gradient_checkpointing = "auto"' in text
    assert Config.model_validate(automatic.without_plan(config).model_dump()).train.gradient_checkpointing is False
    written, _ = policy_step(
        64, 1, "--gradient-checkpointing", "auto", "--fsdp-cpu-offload", "--rollout-slots", "auto"
    )
    assert written.rollout.rollout_slots == 0
    assert (written.train.gradient_checkpointing, written.train.fsdp_cpu_offload) == (None, True)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, known: str) -> None:
    gpu = automatic.gpu_named(name, 40 * GIB)
    assert (gpu.name, gpu.memory) == (known, 40 * GIB)
    assert automatic.gpu_named("a GPU of tomorrow", 30 * GIB).memory == 30 * GIB
