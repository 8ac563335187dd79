"""Text of a model, a data set or a stranger that a terminal shows and does not obey."""

from __future__ import annotations

import contextlib
import unicodedata

import click

_DIRECTION = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def safe_text(text: str) -> str:
    """Text that a terminal shows and does not obey: controls, escapes and direction marks become visible codes."""
    return "".join(_visible(char) for char in text)


def say(text: str) -> None:
    """Print one line on stderr, as :func:`safe_text`; nothing fails where stderr is closed."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(safe_text(text), err=True)


def _visible(char: str) -> str:
    if char in "\n\t":
        return char
    if unicodedata.category(char) in ("Cc", "Cs") or char in _DIRECTION:
        code = ord(char)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return char
