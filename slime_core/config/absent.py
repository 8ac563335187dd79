"""Names that other frameworks have taught, and what slime has in their place."""

ABSENT = {
    "lora": "LoRA and other adapters are not supported: all weights are trained",
    "peft": "LoRA and other adapters are not supported: all weights are trained",
    "vllm": "vLLM is not supported: rollout.rollout_engine is local or sglang",
    "deepspeed": "DeepSpeed is not supported: train.train_backend is fsdp or megatron",
    "tensorboard": "there is no TensorBoard: --use-wandb, or a plugin with slime_sinks; figures lie in metrics.jsonl",
}
"""What others have and slime has not, by a word of its name."""


def absent(name: str) -> str:
    """That slime does not have what a key is named after; empty for other names."""
    words = name.lower().split("_")
    return next((text for word, text in ABSENT.items() if word in words), "")
