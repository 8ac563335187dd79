"""Recorded steps of runs: read them, compare two runs, make a step again."""
