"""A request that is answered in pieces: what came so far, what is still to ask for, and all of it as one Completion.

Whoever stops a request between two tokens (a gate before the engine, an engine whose server went away or takes new
weights) keeps a `protocols.Turn`, asks for its rest, and hands one Completion back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.types import Completion, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from slime_core.protocols import Turn


def made(turn: Turn) -> list[int]:
    """New tokens of a turn so far."""
    return [token for piece in turn.pieces for token in piece.tokens]


def rest(turn: Turn, room: int | None) -> GenerateRequest:
    """What is still to do of a turn, ``room`` tokens of it at most."""
    tokens, request = made(turn), turn.request
    left = request.params.max_new_tokens - len(tokens)
    params = replace(request.params, max_new_tokens=left if room is None else min(left, room))
    return replace(request, tokens=[*request.tokens, *tokens], kept=request.kept + len(tokens), params=params)


def add(turn: Turn, piece: Completion, asked: int) -> None:
    """Note a piece of at most ``asked`` tokens; fewer without a stop mean that the context is full."""
    turn.pieces.append(piece)
    whole = len(made(turn)) >= turn.request.params.max_new_tokens
    if piece.finish != "length" or whole or len(piece.tokens) < asked:
        turn.finish = piece.finish


def whole(turn: Turn, tokenizer: Any) -> Completion:
    """All pieces of a turn as one; the text is decoded anew where there are several."""
    finish = turn.finish or "length"
    if len(turn.pieces) == 1:
        return replace(turn.pieces[0], finish=finish)
    tokens = made(turn)
    return Completion(
        id=turn.request.id,
        tokens=tokens,
        log_probs=[p for piece in turn.pieces for p in piece.log_probs],
        plain_log_probs=plain(turn.pieces),
        finish=finish,
        versions=[v for piece in turn.pieces for v in piece.versions],
        epoch=turn.pieces[-1].epoch if turn.pieces else 0,
        text=decoded(tokenizer, tokens, turn.request.params, finish),
    )


def plain(pieces: Sequence[Completion]) -> list[float]:
    """Plain log-probs of all pieces; empty where an engine does not know them of any."""
    if any(len(piece.plain_log_probs) != len(piece.tokens) for piece in pieces):
        return []
    return [p for piece in pieces for p in piece.plain_log_probs]


def decoded(tokenizer: Any, tokens: Sequence[int], params: SamplingParams, finish: str) -> str:
    """Decoded, and cut before the first stop string where one ended the response, as an engine does."""
    if not tokens or tokenizer is None:
        return ""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    found = [text.find(stop) for stop in params.stop if stop in text]
    return text[: min(found)] if found and finish == "stop" else text
