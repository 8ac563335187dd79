"""FSDP2, from one CPU process up: packed sequences, float32 masters, bfloat16 or float32 compute."""

from slime_core.trainers.fsdp.trainer import FsdpTrainer

__all__ = ["FsdpTrainer"]
