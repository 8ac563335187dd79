"""Checkpoints in the format torch_dist: read and written by rows, converted from model folders and back."""
