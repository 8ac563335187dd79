"""Rows in by index, Prompts out in the run's order."""
