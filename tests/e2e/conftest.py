"""Whole runs, forked from a process that has imported torch."""

import pytest


@pytest.fixture
def slime(forked_slime):
    """Run `slime ARGS` in a folder of its own; the answer has returncode, stdout and stderr."""
    return forked_slime
