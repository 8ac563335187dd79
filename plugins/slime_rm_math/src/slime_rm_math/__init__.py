"""Arithmetic for slime: generated problems, an exact-match reward and the recipe that `make demo` runs."""

__version__ = "0.1.0"
