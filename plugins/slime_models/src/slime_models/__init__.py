"""Bridges between Hugging Face folders and Megatron for slime: a table a family, presets, and `slime models`."""

__version__ = "0.1.0"
