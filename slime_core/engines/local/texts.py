"""Drawn tokens in, text out: decoded once at the end, and as a short tail a step where a request has stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from slime_core.engines.local.jobs import Job
    from slime_core.engines.local.slots import Slots

TOKENS_A_CHARACTER = 4
"""A character is at most four byte tokens."""

MARGIN = 8


class Texts:
    """Decodes; the tokenizer is loaded when it is first needed."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._load = tokenizer
        self._tokenizer: Any = None

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode(self, job: Job) -> str:
        """The new tokens' text, cut before the stop string that ended it."""
        if not job.tokens:
            return ""
        text = self._decode(job.tokens, skip_special_tokens=True)
        found = [text.find(stop) for stop in job.request.params.stop if stop in text]
        return text[: min(found)] if found and job.finish == "stop" else text

    def stops(self, slots: Slots, slot: int) -> bool:
        """Whether the token just drawn completed a stop string."""
        job = slots.jobs[slot]
        assert job is not None
        longest = max(map(len, job.request.params.stop))
        count = TOKENS_A_CHARACTER * longest + MARGIN
        tail = slots.new_tokens(slot, count)
        before = job.earlier(count - len(tail))
        text = self._decode([*before, *tail], skip_special_tokens=False)
        return any(stop in text for stop in job.request.params.stop)
