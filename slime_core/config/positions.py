"""Valid TOML text in; the line of every key out, which `tomllib` does not tell.

A position is found by the path of keys and array indices: ``("train", "lr")``, ``("stage", 0, "lr")``.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^\s,\]}#][^,\]}#\n]*")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


def key_lines(text: str) -> dict[Path, int]:
    """Line number, from 1, of every table header, key and array element of valid TOML."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}  # elements of each array of tables so far
        self._line, self._counted = 1, 0

    def document(self) -> None:
        table: Path = ()
        while True:
            self._blank()
            if self.at >= len(self.text):
                return
            if self.text.startswith("[[", self.at):
                table = self._header("[[", "]]", array=True)
            elif self._peek() == "[":
                table = self._header("[", "]", array=False)
            else:
                self._pair(table)

    def _header(self, opening: str, closing: str, *, array: bool) -> Path:
        line = self._here()
        self.at += len(opening)
        keys = self._keys()
        self.at = self.text.index(closing, self.at) + len(closing)
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

    def _pair(self, table: Path) -> None:
        line = self._here()
        path = table
        for key in self._keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.at = self.text.index("=", self.at) + 1
        self._spaces()
        self._value(path)

    def _keys(self) -> list[str]:
        keys = []
        while True:
            self._spaces()
            if self._peek() in "\"'":
                keys.append(self._string())
            else:
                found = _BARE.match(self.text, self.at)
                if found is None:
                    raise ValueError(f"no key at offset {self.at}")
                keys.append(found[0])
                self.at = found.end()
            self._spaces()
            if self._peek() != ".":
                return keys
            self.at += 1

    def _value(self, path: Path) -> None:
        char = self._peek()
        if char in "\"'":
            self._string()
        elif char == "[":
            self.at += 1
            self._array(path)
        elif char == "{":
            self.at += 1
            self._inline_table(path)
        else:
            found = _SCALAR.match(self.text, self.at)
            if found is None:
                raise ValueError(f"no value at offset {self.at}")
            self.at = found.end()

    def _array(self, path: Path) -> None:
        index = 0
        while True:
            self._blank()
            if self._peek() == "]":
                self.at += 1
                return
            self.lines.setdefault((*path, index), self._here())
            self._value((*path, index))
            index += 1
            self._blank()
            if self._peek() == ",":
                self.at += 1

    def _inline_table(self, path: Path) -> None:
        while True:
            self._blank()
            if self._peek() == "}":
                self.at += 1
                return
            self._pair(path)
            self._blank()
            if self._peek() == ",":
                self.at += 1

    def _string(self) -> str:
        quote = self._peek()
        if self.text.startswith(quote * 3, self.at):
            self.at += 3
            while not self.text.startswith(quote * 3, self.at):
                self.at += 2 if quote == '"' and self._peek() == "\\" else 1
            self.at += 3
            while self._peek() == quote:  # up to two quotes may stand before the closing three
                self.at += 1
            return ""
        self.at += 1
        out = []
        while (char := self.text[self.at]) != quote:
            if char == "\\" and quote == '"':
                out.append(self._escape())
            else:
                out.append(char)
                self.at += 1
        self.at += 1
        return "".join(out)

    def _escape(self) -> str:
        kind = self.text[self.at + 1]
        digits = {"u": 4, "U": 8}.get(kind, 0)
        self.at += 2 + digits
        return chr(int(self.text[self.at - digits : self.at], 16)) if digits else _ESCAPES[kind]

    def _blank(self) -> None:
        while self.at < len(self.text):
            if self._peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self._peek() in " \t\n":
                self.at += 1
            else:
                return

    def _spaces(self) -> None:
        while self._peek() in (" ", "\t"):
            self.at += 1

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line
