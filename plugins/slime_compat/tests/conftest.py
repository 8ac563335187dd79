"""Fixtures of functions by path, and functions written as for THUDM/slime."""

from pathlib import Path

import pytest
from by_path import by, connect, make_group, tokenizer, write

__all__ = ["by", "connect", "make_group", "tokenizer", "write"]


@pytest.fixture
def functions():
    """The folder of functions written as for THUDM/slime."""
    return Path(__file__).parent / "functions"
