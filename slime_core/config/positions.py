"""Find the line of every key of a TOML text, which `tomllib` does not tell.

A position is found by the path of keys and array indices: ``("train", "lr")``, ``("stage", 0, "lr")``.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]

_TOKEN = re.compile(
    r'''#[^\n]*|(?P<token>"""(?:[^\\]|\\.)*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:'{0,2})|"(?:[^"\\]|\\.)*"|'[^']*\''''
    r"""|[\[\]{},=.\n]|[^\s\[\]{},=.#"']+)""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """Line number, from 1, of every table header, key and array element of valid TOML."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


class _Scanner:
    """Tokens of a text (strings, words, punctuation, ends of lines), taken one after another."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}  # elements of each array of tables so far
        self._tokens: list[tuple[str, int]] = []
        line, place = 1, 0
        for match in _TOKEN.finditer(text):
            line, place = line + text.count("\n", place, match.start()), match.start()
            if match["token"]:
                self._tokens.append((match["token"], line))
        self._tokens.append(("", line))
        self._at = 0

    def document(self) -> None:
        table: Path = ()
        while (token := self._past("\n")) != "":
            if token == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        line = self._tokens[self._at][1]
        array = self._tokens[self._at + 1][0] == "["
        self._at += 1 + array
        keys = self._keys()
        self._at += 1 + array
        path: Path = ()
        for i, key in enumerate(keys):
            path = (*path, key)
            if array and i == len(keys) - 1:
                self.lines.setdefault(path, line)
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
            self.lines.setdefault(path, line)
        return path

    def _pair(self, path: Path) -> None:
        line = self._tokens[self._at][1]
        for key in self._keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self._at += 1  # =
        self._value(path)

    def _keys(self) -> list[str]:
        """The parts of a dotted key."""
        keys = []
        while True:
            token = self._tokens[self._at][0]
            keys.append(tomllib.loads(f"x = {token}")["x"] if token[0] in "\"'" else token)
            self._at += 1
            if self._tokens[self._at][0] != ".":
                return keys
            self._at += 1

    def _value(self, path: Path) -> None:
        kind = self._tokens[self._at][0]
        if kind not in ("[", "{"):
            while self._tokens[self._at][0] not in (",", "]", "}", "\n", ""):
                self._at += 1
            return
        self._at += 1
        index = 0
        while self._past("\n", ",") not in ("]", "}"):
            if kind == "{":
                self._pair(path)
                continue
            self.lines.setdefault((*path, index), self._tokens[self._at][1])
            self._value((*path, index))
            index += 1
        self._at += 1

    def _past(self, *skipped: str) -> str:
        """The next token that is none of these."""
        while self._tokens[self._at][0] in skipped:
            self._at += 1
        return self._tokens[self._at][0]
