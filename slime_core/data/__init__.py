"""Prompts from rows, in the run's order."""
