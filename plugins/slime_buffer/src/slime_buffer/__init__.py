"""The rollout buffer: groups and rollouts over HTTP, its client, and a generator's loop."""
