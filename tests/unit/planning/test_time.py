"""Predicted seconds: within 15 % of the measurements of docs/benchmarks.md, each row by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from measured import QWEN3_4B, policy_step

from slime_core.config.load import load_config
from slime_core.planning.batch import BatchPlan, PackSize
from slime_core.planning.decoding import response_lengths
from slime_core.planning.footprint import Lengths
from slime_core.planning.gpus import gpu_of
from slime_core.planning.memory import fits
from slime_core.planning.time import TimePlan

pytestmark = pytest.mark.unit
QWEN3_06B = QWEN3_4B | {
    "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
ONE_LONG = ("--gradient-checkpointing", "--fsdp-cpu-offload", "--activation-offload")


@pytest.mark.parametrize(
    ("length", "sequences", "flags", "tokens_per_second"),
    [
        pytest.param(8192, 16, (), 16270, id="fsdp, 16 sequences"),
        pytest.param(8192, 4, (), 16020, id="fsdp, 4 sequences"),
        pytest.param(16384, 2, (), 12634, id="fsdp, 16k tokens"),
        pytest.param(65536, 1, ONE_LONG, 4390, id="64k tokens, all recomputed, state on the host"),
        pytest.param(8192, 4, ("--lora-rank", "32"), 4 * 8192 / 1.722, id="adapters, 4 sequences"),
        pytest.param(
            1024, 8, ("--lora-rank", "32", "--max-tokens-per-gpu", "8192"), 8192 / 0.380, id="adapters, short"
        ),
        pytest.param(1024, 8, ("--max-tokens-per-gpu", "8192"), 8192 / 0.504, id="fsdp, short"),
    ],
)
def test_a_policy_step_takes_what_was_measured(
    length: int, sequences: int, flags: tuple[str, ...], tokens_per_second: float
) -> None:
    config, lengths = policy_step(length, sequences, *flags)
    time = TimePlan.of(fits(config, QWEN3_4B, gpu_of("h200"), lengths=lengths))
    assert time is not None
    assert length * sequences / time.total == pytest.approx(tokens_per_second, rel=0.15)
    assert time.bottleneck == "train: products"


@pytest.mark.parametrize(
    ("model", "engine", "speeds"),
    [
        pytest.param(SMOLLM2, "local", (52682, 98625, 175523), id="135M, embedded"),
        pytest.param(QWEN3_06B, "local", (25822, 41024, 51391), id="0.6B, embedded"),
        pytest.param(QWEN3_4B, "local", (11441, 23318, 23134), id="4B, embedded"),
        pytest.param(SMOLLM2, "sglang", (34370, 77077, 91203), id="135M, SGLang"),
        pytest.param(QWEN3_06B, "sglang", (19075, 31519, 32910), id="0.6B, SGLang"),
        pytest.param(QWEN3_4B, "sglang", (9718, 19023, 17715), id="4B, SGLang"),
    ],
)
def test_generation_is_as_fast_as_measured(model: dict[str, Any], engine: str, speeds: tuple[int, ...]) -> None:
    lengths = Lengths(prompt=128, response=512, longest=640, p95=512, source="the benchmark")
    for samples, measured in zip((64, 256, 1024), speeds, strict=True):
        flags = [f"rollout.rollout_batch_size={samples}", f"rollout.rollout_slots={samples}"]
        flags += ["rollout.n_samples_per_prompt=1", "train.advantage_estimator=reinforce_plus_plus"]
        flags += ["rollout.server_concurrency=1024", "--rollout-engine", engine, "rollout.debug_rollout_only=true"]
        config = load_config(None, ["--hf-checkpoint", "/", "--prompt-data", "/", *flags])
        time = TimePlan.of(fits(config, model, gpu_of("h100"), lengths=lengths))
        assert time is not None
        assert samples * 512 / time.seconds["rollout"] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("prompt", "flags", "measured"),
    [
        pytest.param(256, (), 0.433, id="prompts of 256"),
        pytest.param(100, (), 0.385, id="prompts of 100"),
        pytest.param(100, ("--gradient-checkpointing", "--max-tokens-per-gpu", "16384"), 0.493, id="recomputed"),
    ],
)
def test_training_in_a_run_takes_what_was_measured(prompt: int, flags: tuple[str, ...], measured: float) -> None:
    """Eight prompts of eight answers of 512 tokens, 0.6 billion weights: short sequences, many logits."""
    lengths = Lengths(prompt=prompt, response=512, longest=prompt + 512, p95=512, source="the run")
    shape = ["rollout.rollout_batch_size=8", "rollout.n_samples_per_prompt=8", "rollout.rollout_max_response_len=512"]
    config = load_config(None, ["--hf-checkpoint", "/", "--prompt-data", "/", "--dtype", "bfloat16", *shape, *flags])
    time = TimePlan.of(fits(config, QWEN3_06B, gpu_of("h200"), lengths=lengths))
    assert time is not None
    assert time.seconds["train"] + time.seconds["update"] == pytest.approx(measured, rel=0.15)


def test_a_step_of_a_small_model_takes_what_was_measured() -> None:
    """SmolLM2-135M with the embedded engine: rollout 0.206, train 0.110, the step 0.363 s."""
    lengths = Lengths(prompt=60, response=93.5, longest=160, p95=96, source="the run")
    config = load_config(None, ["--hf-checkpoint", "/", "--prompt-data", "/", "rollout.rollout_max_response_len=96"])
    time = TimePlan.of(fits(config, SMOLLM2, gpu_of("h100"), lengths=lengths))
    assert time is not None
    assert time.seconds["rollout"] == pytest.approx(0.206, rel=0.15)
    assert time.seconds["train"] == pytest.approx(0.110, rel=0.15)
    assert time.total == pytest.approx(0.363, rel=0.15)


def test_batch_arithmetic_by_hand() -> None:
    lengths = Lengths(prompt=100, response=50, longest=200, p95=90, source="by hand")
    flags = ["rollout.rollout_batch_size=8", "rollout.n_samples_per_prompt=4", "train.global_batch_size=16"]
    flags += ["rollout.max_staleness=1", "--no-colocate"]
    config = load_config(None, ["--hf-checkpoint", "/", "--prompt-data", "/", *flags])
    batch = BatchPlan.of(config, lengths)
    assert (batch.samples, batch.optimizer_steps, batch.effective_batch) == (32, 2, 16)
    assert (batch.tokens, batch.computed) == (32 * 150, 32 * 50 + 8 * 100)
    assert batch.off_policy_steps == 3  # the version before, whose two steps were made, and the first of this one
    assert batch.micro_batches(tokens=256, data=2) == 3  # 2,400 tokens by 2 steps and 2 ranks are 600
    assert batch.pack(256, 2, lengths, 4) == PackSize(256, 86)  # lengths differ: as full as it may be
    alike = replace(lengths, p95=50, longest=150)
    assert batch.pack(256, 2, alike, 4) == PackSize(250, 150)  # of 8 samples 3, 3 and 2, which share a prompt


def test_lengths_have_the_stated_mean_and_percentile() -> None:
    lengths = Lengths(prompt=10, response=800, longest=100_000, p95=2400, source="by hand")
    values = sorted(response_lengths(lengths, 1000))
    assert sum(values) / 1000 == pytest.approx(800, rel=0.02)
    assert values[949] == pytest.approx(2400, rel=0.02)
