"""A plan against measurement: memory within 5 %, seconds of a step within 15 %, full and LoRA, backends and engines.

Each case is a run of a few steps of a model of 0.6 billion weights from a seed, whose answers are as long as they may
be; `slime plan RUN` compares. Of SGLang's servers the trainer's process alone is compared. `tools/gpu/plan.sh` prints
the tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cli.plan_measured import beside
from slime_core.testing.models import char_tokenizer

pytestmark = pytest.mark.gpu
SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_hidden_layers": 28,
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960, "eos_token_id": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
REWARD = "async def reward(args, sample, **kwargs):\n    return float(len(set(sample.tokens)) % 2)\n"
LORA = ["--lora-rank", "32"]
SGLANG, MEGATRON = ["--rollout-engine", "sglang"], ["--train-backend", "megatron", "--plugin", "models"]
CASES = {
    "fsdp-embedded": [],
    "fsdp-embedded-recomputed": ["--gradient-checkpointing", "--max-tokens-per-gpu", "16384"],
    "fsdp-embedded-lora": LORA,
    "fsdp-embedded-lora-adapter": [*LORA, "--lora-sync", "adapter"],
    "fsdp-embedded-qlora": [*LORA, "--base-weights", "nf4", "--lora-sync", "adapter"],
    "fsdp-sglang": SGLANG,
    "fsdp-sglang-lora": [*SGLANG, *LORA],
    "megatron-embedded": MEGATRON,
    "megatron-sglang": [*MEGATRON, *SGLANG],
    "megatron-sglang-lora": [*MEGATRON, *SGLANG, *LORA],
}
PROMPT = 256  # tokens
EXACT = {"train", "rollout"}  # the phases that decide whether a run fits


@pytest.mark.parametrize("case", CASES)
def test_what_was_planned_is_what_is_measured(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    recipe: list[str] = []
    if "sglang" in case:
        _, sglang = request.getfixturevalue("place")
        make_model(tmp_path)
        sglang.config(tmp_path / "model")  # writes model.toml
        recipe = ["model.toml"]
    answer = planned_run(tmp_path, [*recipe, *CASES[case]])
    print(json.dumps({name: answer[name] for name in ("memory", "seconds", "lengths")}, indent=1))
    for row in answer["memory"]:
        if row["phase"] in EXACT:
            assert row["ratio"] == pytest.approx(1, abs=0.05), row
    (step,) = (row for row in answer["seconds"] if row["part"] == "a step")
    assert step["ratio"] == pytest.approx(1, abs=0.15), answer["seconds"]


def make_model(root: Path) -> Path:
    """A folder without weights."""
    model = root / "model"
    model.mkdir(exist_ok=True)
    char_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(SHAPE))
    return model


def planned_run(root: Path, flags: list[str]) -> dict:
    """A run of six steps of 64 answers of 512 tokens to prompts of 256, and what it measured beside its plan."""
    model = make_model(root)
    questions = ((f"{n}+1=" * PROMPT)[:PROMPT] for n in range(64))
    (root / "rows.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in questions))
    (root / "own_reward.py").write_text(REWARD)
    words = [
        sys.executable,
        "-m",
        "slime_cli.main",
        "run",
        "--hf-checkpoint",
        str(model),
        "--init-weights",
        "random",
        "--dtype",
        "bfloat16",
    ]
    words += ["--prompt-data", str(root / "rows.jsonl"), "--input-key", "question"]
    words += ["--custom-rm-path", "own_reward.py:reward", "--num-rollout", "6", "--rollout-batch-size", "8"]
    words += ["--n-samples-per-prompt", "8", "--rollout-max-response-len", "512"]
    words += ["--rollout-max-context-len", str(PROMPT + 512)]
    words += ["--rollout-slots", "64", "--save-interval", "0", "--lr", "1e-6", "--run-dir", str(root / "run")]
    subprocess.run([*words, *flags], cwd=root, check=True)  # a process of its own, whose memory is the run's
    return beside(root / "run")
