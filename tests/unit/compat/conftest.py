"""Fixtures of functions by path."""

from by_path import by, connect, make_group, tokenizer, write

__all__ = ["by", "connect", "make_group", "tokenizer", "write"]
