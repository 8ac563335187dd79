"""Recipes and flags in, one frozen Config out; every error names file, line and key."""
