"""Mathematics that several algorithms share, and what binds it to a step's batch."""
