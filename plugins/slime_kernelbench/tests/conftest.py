"""Fixtures of more than one module."""

import os

import pytest


@pytest.fixture
def folder(tmp_path):
    """Where stand-in workers wait and tell, by two pipes."""
    for pipe in ("begun", "go"):
        os.mkfifo(tmp_path / pipe)
    return tmp_path
