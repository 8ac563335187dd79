"""What responses say: whether a label is in one, how much it repeats itself, how it is shown. Pure functions."""

from __future__ import annotations

import json
import re
import zlib

CUT = re.compile(r"\n\[\.\.\. \d+ characters \.\.\.\]\n")
"""Where samples.jsonl leaves out the middle of a long text."""
SHOWN = 160  # characters of a text that evidence shows


def has_label(response: str, label: str) -> bool:
    """Whether the label stands in the response as a word, whatever its case, spacing, and commas in numbers.

    Example:
        has_label("so it is 1,024.", "1024")
    """
    plain, answer = _plain(response), _plain(label)
    return bool(answer) and re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", plain) is not None


def compression_ratio(text: str) -> float:
    """Bytes after zlib over bytes before; English prose of a page has about 0.5, a repeated phrase below 0.1."""
    data = CUT.sub("\n", text).encode("utf-8", "surrogatepass")
    return len(zlib.compress(data, 6)) / max(1, len(data))


def shown(text: str) -> str:
    """A text on one line, its middle left out where it is long."""
    line = json.dumps(text, ensure_ascii=False)
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]} ... {line[-SHOWN // 2 :]}"


def _plain(text: str) -> str:
    without = re.sub(r"(?<=\d),(?=\d{3})", "", text.casefold())
    return " ".join(without.split()).strip()
