"""Rows of docs/benchmarks.md that a plan must predict: policy steps of one H200, Qwen3-4B's shape, bfloat16."""

from __future__ import annotations

from typing import Any

from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.planning.footprint import Lengths

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def policy_step(length: int, sequences: int, *flags: str) -> tuple[Config, Lengths]:
    """What `tools/bench/bench_policy_step.py` computes: so many sequences, each of its own prompt, each a pack."""
    given = [
        *("--hf-checkpoint", "/", "rollout.load_debug_rollout_data=/", "rollout.debug_train_only=true"),
        *("train.advantage_estimator=reinforce_plus_plus", "rollout.n_samples_per_prompt=1"),
        *(f"rollout.rollout_batch_size={sequences}", "--dtype", "bfloat16", "--max-tokens-per-gpu", str(length)),
    ]
    lengths = Lengths(prompt=64, response=length - 64, longest=length, p95=length, source="the benchmark")
    return load_config(None, [*given, *flags]), lengths
