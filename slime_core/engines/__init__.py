"""Rollout engines behind the Engine protocol."""
