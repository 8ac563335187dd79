"""What functions written for THUDM/slime import and ask: its modules, and `/generate` before the run's engine."""
