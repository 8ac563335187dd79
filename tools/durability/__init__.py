"""Prove that runs survive kills and power cuts: used by tests and tools, never by slime itself."""
