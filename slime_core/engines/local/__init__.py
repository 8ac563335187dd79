"""The embedded engine: any Hugging Face causal LM, continuous batching, batch-invariant on CPU."""
