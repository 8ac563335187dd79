"""Config of a run from recipes and flags; every error names file, line and key."""
