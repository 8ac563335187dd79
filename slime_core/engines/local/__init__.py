"""The embedded engine: any Hugging Face causal LM, continuous batching, batch-invariant on CPU."""

from slime_core.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
