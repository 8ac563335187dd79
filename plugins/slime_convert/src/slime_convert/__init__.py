"""Checkpoints to model folders, tensor by tensor: `slime convert`, and the library that its words share."""
