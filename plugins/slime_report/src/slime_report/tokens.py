"""Token ids as the bytes that they stand for, of the tokenizer that a run used; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Characters of byte-level vocabularies, as GPT-2 introduced them: printable bytes stand for themselves.

    Source: Radford et al. 2019, the table `bytes_to_unicode` of their encoder.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """The bytes of token ids.

    Example:
        Vocabulary.of(["runs/demo-0/final"]).texts([17, 4])     # ["Ġ" of byte-level models is " "]

    Bytes are given as text with one character a byte (Latin-1), since a token may end within a character.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer  # of the package tokenizers; None: ids are shown as numbers
        self._texts: dict[int, str] = {}

    @classmethod
    def of(cls, folders: Iterable[str | Path]) -> Vocabulary:
        """That of the first place which has a tokenizer: a model folder, or a name of the hub that is in its cache."""
        for folder in map(str, filter(None, folders)):
            if (file := tokenizer_file(folder)) is not None:
                from tokenizers import Tokenizer

                return cls(Tokenizer.from_file(str(file)))
        return cls()

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Of a byte-level vocabulary, which has the space byte as a token; else empty."""
        return byte_alphabet() if self.tokenizer.token_to_id("Ġ") is not None else {}

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The bytes of each id, a character a byte."""
        texts = self._texts
        return [texts[token] if token in texts else texts.setdefault(token, self._text(token)) for token in ids]

    def _text(self, token: int) -> str:
        piece = self.tokenizer.id_to_token(token) if self.tokenizer is not None else None
        if piece is None:
            return f"⟨{token}⟩".encode().decode("latin-1")
        if match := BYTE.fullmatch(piece):
            return chr(int(match[1], 16))
        if all(char in self._alphabet for char in piece):
            return "".join(chr(self._alphabet[char]) for char in piece)
        return str(piece).replace("▁", " ").encode().decode("latin-1")


def tokenizer_file(place: str) -> Path | None:
    """``tokenizer.json`` of a model folder or of the hub's cache on this machine."""
    if (file := Path(place) / "tokenizer.json").is_file():
        return file
    if place.count("/") > 1 or place.startswith(("/", ".")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(place, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
