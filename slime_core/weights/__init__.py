"""Weights: model folders in, modules and tensors by Hugging Face name out."""
