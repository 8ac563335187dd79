"""Pictures of a row's columns put into its prompt: ``<image>`` and parts without a reference take the next of them.

{"problem": "<image>Find x.", "images": ["a.png"]} -> [{"type": "image", "image": "a.png"}, {"type": "text", ...}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.media.references import KINDS, Access, checked, kind_of, kind_of_part, parts_of, text_part, value_of
from slime_core.types import MediaInputs, Message

MARK = re.compile(r"<(image|video|audio)>")


def placed(content: str | list[Message], columns: Mapping[str, Sequence[Any]], where: str) -> list[Message]:
    """Messages whose parts name all media: those of messages as they are, others from ``columns``, kind to references.

    A text becomes one user message. ``<image>`` is a placeholder only where there is a column of pictures.

    Raises:
        DataError: DAT38 too few references, or some that no placeholder takes.
    """
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    remaining = {kind: list(values) for kind, values in columns.items()}
    counts = dict.fromkeys(remaining, 0)

    def next_of(kind: str) -> Any:
        counts[kind] = counts.get(kind, 0) + 1
        return remaining[kind].pop(0) if remaining.get(kind) else None

    def filled(part: dict[str, Any]) -> list[dict[str, Any]]:
        if kind := kind_of_part(part):
            value = value_of(kind, part)
            single = kind.removesuffix("s")
            return [{"type": single, single: next_of(kind) if value is None else value}]
        return split(part["text"]) if isinstance(part.get("text"), str) else [part]

    def split(text: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        place = 0
        for match in MARK.finditer(text):
            if KINDS[match[1]] in remaining:
                parts += [{"type": "text", "text": text[place : match.start()]}] if match.start() > place else []
                parts.append({"type": match[1], match[1]: next_of(KINDS[match[1]])})
                place = match.end()
        return parts + ([{"type": "text", "text": text[place:]}] if text[place:] else [])

    whole = []
    for message in messages:
        value = message.get("content")
        if isinstance(value, str) and MARK.search(value):
            parts = split(value)
            value = parts if any(part["type"] != "text" for part in parts) else value
        elif isinstance(value, list):
            value = [part for one in value for part in filled(one)]
        whole.append({**message, "content": value} if "content" in message else message)
    for kind in counts:
        if counts[kind] != len(columns.get(kind, ())):
            raise _miscounted(kind, len(columns.get(kind, ())), counts[kind], where)
    return whole


def references_of(messages: Sequence[Message]) -> MediaInputs:
    """The references of messages' parts, by kind, in order."""
    inputs: MediaInputs = {}
    for kind, part in parts_of(messages):
        inputs.setdefault(kind, []).append(value_of(kind, part))
    return inputs


def bare(messages: Sequence[Message]) -> list[Message]:
    """The messages as a chat template needs them: parts say that there is a picture, and not which."""
    whole: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = map(kind_of_part, content)
            parts = [{"type": k.removesuffix("s")} if k else text_part(part) for k, part in zip(kinds, content)]
            message = {**message, "content": parts}
        whole.append(message)
    return whole


def plainly(messages: Sequence[Message], marks: Mapping[str, str]) -> str:
    """The text of one message without a chat template, with the family's own text for a picture."""
    pieces = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            kind = kind_of(str(part.get("type")))
            pieces.append(marks.get(kind, f"<{kind.removesuffix('s')}>") if kind else str(part.get("text", "")))
    return "".join(pieces)


def checked_parts(content: Sequence[dict[str, Any]], where: str, access: Access) -> list[dict[str, Any]]:
    """A message's parts, whose references are checked, and absolute.

    Raises:
        DataError: DAT33, DAT24.
    """
    parts = []
    for part in content:
        kind = kind_of_part(part)
        value = value_of(kind, part) if kind else None
        single = kind.removesuffix("s")
        bare_part = part if kind else text_part(part)
        parts.append(bare_part if value is None else {"type": single, single: checked(value, where, access)})
    return parts


def _miscounted(kind: str, references: int, placeholders: int, where: str) -> DataError:
    single = kind.removesuffix("s")
    column = "" if references else f"\nother rows have {kind}: name their column in data.multimodal_keys"
    return DataError(
        f"the row has {references} {kind} for {placeholders} placeholders",
        code="DAT38",
        where=where,
        why=f"each <{single}> of the prompt takes the next of the row's {kind}, and none may be left over",
        fix=f"write one <{single}> for each into the prompt, or leave such rows out with data.max_bad_rows{column}",
    )
