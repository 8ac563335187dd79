"""Prove that runs survive kills and power cuts, with a small trainer and ledger: used by tests and tools only."""
