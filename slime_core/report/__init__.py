"""Metrics, sinks and the run directory."""
