"""A completion of SGLang's, ended where the embedded engine would have ended it.

SGLang's stop strings see new tokens alone, and its ``ignore_eos`` turns stop token ids off. What was drawn after the
end is dropped: a rule that looks at earlier tokens alone may be applied late. Where the last token that was allowed is
the one that ends the response, SGLang before 0.5.23 says ``length``; it is a ``stop``, or whole answers count as cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.types import Completion, GenerateRequest, SamplingParams

TOKENS_A_CHARACTER, MARGIN = 4, 8
"""How far stop strings look back, as in the embedded engine."""

Decode = Callable[[Sequence[int], bool], str]
"""Token ids, and whether special tokens are left out, to text."""


def needs_text(request: GenerateRequest, *, tokenizer: bool) -> bool:
    """Whether stop strings are to be looked for where a server, with a ``tokenizer`` or without, looks for none."""
    return bool(request.params.stop) and (request.kept > 0 or not tokenizer)


def cut(
    done: Completion, request: GenerateRequest, decode: Decode | None, *, tokenizer: bool, eos: Collection[int] = ()
) -> Completion:
    """End a completion (in place) at a stop token id in spite of ``ignore_eos``, and at a stop string that begins in
    the kept tokens, or anywhere where the server has no ``tokenizer``; ``eos`` are the ids that end any response.

    ``decode`` is there where `needs_text` says so.
    """
    p = request.params
    end = len(done.tokens)
    if p.ignore_eos and p.stop_token_ids:
        ends = set(p.stop_token_ids)
        end = next((i + 1 for i, token in enumerate(done.tokens) if token in ends), end)
        if end < len(done.tokens) or (end and done.tokens[-1] in ends):
            done.finish = "stop"
    if done.tokens and done.finish == "length" and _ends(done, p, decode, () if p.ignore_eos else eos):
        done.finish = "stop"
        if p.stop and decode is not None:
            done.text = _text(done, p.stop, decode)
    if done.tokens and needs_text(request, tokenizer=tokenizer):
        assert decode is not None
        reach = TOKENS_A_CHARACTER * max(map(len, p.stop)) + MARGIN
        before = request.tokens[len(request.tokens) - request.kept :][-reach:]
        span = done.tokens[:end] if not tokenizer else done.tokens[: min(reach, end)]
        if match := first_stop(before, span, p.stop, decode):
            end, done.finish = match, "stop"
    if end < len(done.tokens):
        done.tokens, done.log_probs, done.versions = done.tokens[:end], done.log_probs[:end], done.versions[:end]
        done.plain_log_probs = done.plain_log_probs[:end]
        if done.routed_experts is not None:
            done.routed_experts = done.routed_experts[: len(request.tokens) + end - 1]
        done.text = _text(done, p.stop, decode)
    elif decode is not None and done.finish == "stop" and end and done.tokens[-1] in p.stop_token_ids:
        done.text = _text(done, p.stop, decode)  # SGLang leaves that token's text out, special or not
    return done


def _ends(done: Completion, p: SamplingParams, decode: Decode | None, eos: Collection[int]) -> bool:
    """Whether the last token ends the response: a stop id, or the end of a stop string."""
    if done.tokens[-1] in p.stop_token_ids or done.tokens[-1] in eos:
        return True
    if decode is None or not p.stop:
        return False
    text = decode(done.tokens[-(TOKENS_A_CHARACTER * max(map(len, p.stop)) + MARGIN) :], False)
    return any(stop in text for stop in p.stop)


def first_stop(before: Sequence[int], tokens: Sequence[int], stops: Sequence[str], decode: Decode) -> int:
    """How many of ``tokens`` after ``before`` it takes until the text holds a stop string; 0 where none does."""

    def stopped(count: int) -> bool:
        text = decode([*before, *tokens[:count]], False)
        return any(stop in text for stop in stops)

    if not stopped(len(tokens)):
        return 0
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    return low


def _text(done: Completion, stops: Sequence[str], decode: Decode | None) -> str:
    if decode is None:
        return ""
    text = decode(done.tokens, True)
    positions = [text.find(stop) for stop in stops if stop in text]
    return text[: min(positions)] if positions and done.finish == "stop" else text
