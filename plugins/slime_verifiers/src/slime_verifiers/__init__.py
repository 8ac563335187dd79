"""Environments of verifiers, each in a process of its own, played by the run's engine and trained on its tokens."""
