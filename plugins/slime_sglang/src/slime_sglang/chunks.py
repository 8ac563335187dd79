"""The answer so far, from the chunks of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_sglang import wire
from slime_sglang.http import fault


@dataclass(slots=True)
class ChunkedAnswer:
    """The chunks of a stream put together, be they whole each time or only what is new.

    A chunk's log-probs tell which: as many as the answer has tokens so far, or only its own. (An aborted request of
    0.5.12 has all log-probs and only the last id.)
    """

    rows: list[Any] = field(default_factory=list)
    text: str = ""

    def add(self, answer: Any, where: str) -> dict[str, Any]:
        """A chunk; returns the answer so far. ServerFault ENG71 or ENG79 where it fits neither way."""
        info = wire.meta(answer, where)
        ids, rows, text = answer["output_ids"], info.get("output_token_logprobs"), answer.get("text")
        total = info.get("completion_tokens", len(ids))
        if rows is None and not total:
            rows = []
        if not isinstance(rows, list):
            raise fault(f"{len(ids)} tokens came without log-probs", "ENG79", where)
        whole = len(rows) == total
        if not whole and len(self.rows) + len(rows) != total:
            raise fault(f"a chunk has {len(rows)} log-probs after {len(self.rows)}, of {total} tokens", "ENG79", where)
        try:
            tail = [row[1] for row in rows]
        except (TypeError, IndexError, KeyError):
            raise fault("the log-probs are not a list of numbers and ids", "ENG79", where) from None
        if ids != tail and ids != tail[len(tail) - len(ids) :]:
            raise fault("the ids of a chunk are not those of its log-probs", "ENG79", where)
        self.rows = rows if whole else self.rows + rows
        if isinstance(text, str):
            self.text = text if whole else self.text + text
        everything = {**info, "output_token_logprobs": self.rows}
        return {"text": self.text, "output_ids": [row[1] for row in self.rows], "meta_info": everything}
