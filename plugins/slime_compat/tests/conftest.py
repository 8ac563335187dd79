"""Fixtures of functions by path, and functions written as for THUDM/slime."""

import sys
from pathlib import Path

import pytest
from by_path import by, connect, make_group, tokenizer, write

from slime_compat.finder import Finder

__all__ = ["by", "connect", "make_group", "tokenizer", "write"]


@pytest.fixture(autouse=True)
def no_finder_of_another_test():
    """Tests of trainers end without closing their plugins: what those served to functions is taken away."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Finder)]:
        finder.remove()


@pytest.fixture
def functions():
    """The folder of functions written as for THUDM/slime."""
    return Path(__file__).parent / "functions"
