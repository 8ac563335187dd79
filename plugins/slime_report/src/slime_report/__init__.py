"""Runs of slime as one HTML file; also a library: a run directory as plain data, and the page that shows it."""

__version__ = "0.1.0"
