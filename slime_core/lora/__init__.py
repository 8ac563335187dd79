"""LoRA: which layers have adapters, the layers themselves, and adapter folders in peft's format."""
