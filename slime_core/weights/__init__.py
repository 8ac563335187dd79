"""Weights: model folders as modules and as tensors by Hugging Face name."""
