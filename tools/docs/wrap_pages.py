"""Wrap the prose of Markdown pages at 120 columns; tables, code, headings and links stay as they are.

python tools/docs/wrap_pages.py docs/*.md README.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 120
WHOLE = re.compile(r"(?:`+[^`\n]*`+|!?\[[^\]]*\]\([^)]*\)|\S)+")
"""A word, with the spans of code and links in it."""
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
APART = re.compile(r"\s*(?:#|\||>|<|\[[^\]]+\]:|$)")
STARTS = re.compile(r"(?:[-*+]|\d+[.)]|#+|[|>=].*|-{2,})$")
"""A word that would begin a list, a heading, a table or a quotation if a line began with it."""


def wrapped(page: str) -> str:
    """Wrap each paragraph and list item that has a line longer than WIDTH."""
    return "\n".join(line for block, prose in blocks(page.split("\n")) for line in (wrap(block) if prose else block))


def blocks(lines: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Paragraphs and list items, which are prose; every other line is a block of its own."""
    block: list[str] = []
    fence = ""
    for line in lines:
        mark = re.match(r"\s*(```+|~~~+)", line)
        item = not fence and ITEM.match(line)
        prose = not (fence or mark or APART.match(line) or (not block and not item and line.startswith("    ")))
        if block and (item or not prose):
            yield block, True
            block = []
        if prose:
            block.append(line)
        else:
            yield [line], False
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
    if block:
        yield block, True


def wrap(block: list[str]) -> list[str]:
    """Fill a block's lines, each below the text of the first one."""
    if all(len(line) <= WIDTH for line in block):
        return block
    item = ITEM.match(block[0])
    first = item[0] if item else ""
    lines, line = [], first
    for word in words(" ".join(block)[len(first) :]):
        if len(line) + len(word) > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(first)
        line += word + " "
    return [*lines, line.rstrip()]


def words(text: str) -> list[str]:
    """Words of a text, one that may begin no line with the word before it."""
    found: list[str] = []
    for word in WHOLE.findall(text):
        if found and STARTS.match(word):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(wrapped(path.read_text()))
