"""What several algorithms share: the mathematics, numbers in and numbers out, and what binds it to a step's batch."""
