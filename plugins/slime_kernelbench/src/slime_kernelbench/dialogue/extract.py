"""The code of an answer's fence, character for character; nothing completes or repairs it.

    reasoning is left out     everything before the last </think>; all of it where <think> never closes
    fences by CommonMark      a line of three or more backticks or tildes opens, one at least as long closes
    inside an open fence      a fence line that names a language opens a block of its own, so Markdown around the code
                              and docstrings that show code both keep their pairs
    which block               the last that defines `class ModelNew`, else the last of a language that kernels are
                              written in, else the last without a language; never a shell's, an output's or a diff's

A block that is not closed is no answer: whoever sampled it ran out of room, or never ended it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_core.data.turns import CLOSE, OPEN

LANGUAGES = frozenset({"python", "py", "python3", "triton", "cuda", "cu", "cpp", "c++"})
PROSE = frozenset({"markdown", "md"})
FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>[^\r\n]*)")
DEFINES = re.compile(r"^[ \t]*class[ \t]+ModelNew\b", re.MULTILINE)


@dataclass(slots=True, frozen=True, kw_only=True)
class Extraction:
    """The code of an answer, or why there is none.

    Example: Extraction(source=None, why="the code block is not closed")
    """

    source: str | None
    why: str = ""


@dataclass(slots=True)
class _Block:
    marks: str
    language: str
    start: int  # of the content
    end: int = -1  # of the content; -1 while it is open

    def closes(self, marks: str, info: str) -> bool:
        return not info.strip() and marks[0] == self.marks[0] and len(marks) >= len(self.marks)

    def holds(self, other: _Block) -> bool:
        return self.start < other.start and other.end <= self.end


def source_of(text: str, *, reasoning_open: bool = False) -> str | None:
    """The code between the fences exactly as sampled, or None where there is none.

    Example:
        source_of("<think>hm</think>Here:\\n```py\\nclass ModelNew: ...\\n```\\n")     # "class ModelNew: ...\\n"
    """
    return extract(text, reasoning_open=reasoning_open).source


def extract(text: str, *, reasoning_open: bool = False) -> Extraction:
    """:func:`source_of`, with the reason where there is no code.

    Args:
        text: an answer, decoded
        reasoning_open: whether the prompt itself ends inside of reasoning, as some chat templates have it
    """
    begin = answer_start(text, reasoning_open=reasoning_open)
    if begin is None:
        return Extraction(source=None, why="the reasoning never ended, so there is no answer")
    blocks, unclosed = _blocks(text, begin, nested=True)
    flat = _blocks(text, begin, nested=False)[0] if unclosed else []  # a fence in a comment opened what never closed
    chosen = _defining(text, blocks) or _defining(text, flat) or _last(blocks) or _last(flat)
    if chosen is not None:
        return Extraction(source=text[chosen.start : chosen.end])
    return Extraction(source=None, why="the code block is not closed" if unclosed else "there is no code block")


def answer_start(text: str, *, reasoning_open: bool = False) -> int | None:
    """Where the answer begins after the reasoning; None where reasoning never ends."""
    close = text.rfind(CLOSE)
    if close >= 0:
        return close + len(CLOSE)
    return None if reasoning_open or OPEN in text else 0


def _blocks(text: str, begin: int, *, nested: bool) -> tuple[list[_Block], bool]:
    """The closed blocks in the order of their ends, and whether one was left open."""
    blocks: list[_Block] = []
    stack: list[_Block] = []
    place = begin
    while place < len(text):
        line_end = text.find("\n", place)
        after = len(text) if line_end < 0 else line_end + 1
        if fence := FENCE.match(text, place):
            _fence(fence["marks"], fence["info"], place, after, stack, blocks, nested)
        place = after
    return blocks, bool(stack)


def _fence(
    marks: str, info: str, place: int, after: int, stack: list[_Block], blocks: list[_Block], nested: bool
) -> None:
    if stack and stack[-1].closes(marks, info):
        block = stack.pop()
        block.end = place
        blocks.append(block)
        return
    words = info.split()
    language = words[0].strip("{}.,:").lower() if words else ""
    if "`" not in info and (not stack or (nested and _opens_inside(stack[-1], marks, language))):
        stack.append(_Block(marks, language, after))


def _opens_inside(outer: _Block, marks: str, language: str) -> bool:
    """Whether a fence line inside a block begins one of its own; shorter or other marks are text of the outer one."""
    return (
        bool(language) and marks[0] == outer.marks[0] and (len(marks) == len(outer.marks) or outer.language in PROSE)
    )


def _candidates(blocks: list[_Block]) -> list[_Block]:
    """Blocks that may hold a kernel: of its languages or of none, and not a part of another kernel's code."""
    code = [block for block in blocks if block.language in LANGUAGES]
    may = [*code, *(block for block in blocks if not block.language)]
    return sorted((b for b in may if not any(other.holds(b) for other in code)), key=lambda block: block.end)


def _defining(text: str, blocks: list[_Block]) -> _Block | None:
    definitions = [block for block in _candidates(blocks) if DEFINES.search(text, block.start, block.end)]
    inner = [block for block in definitions if not any(block.holds(other) for other in definitions)]
    return inner[-1] if inner else None


def _last(blocks: list[_Block]) -> _Block | None:
    may = _candidates(blocks)
    return next((block for block in reversed(may) if block.language), may[-1] if may else None)
