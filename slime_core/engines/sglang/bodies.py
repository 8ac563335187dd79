"""A GenerateRequest in, what is posted to SGLang's /generate out; checked: a wrong token id would end the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_core.types import GenerateRequest

NO_TOKENIZER = "skip_tokenizer_init"
"""Feature: the server answers no text and knows no stop strings."""


def check(request: GenerateRequest, *, vocab_size: int, context_len: int) -> int:
    """How many new tokens a request may have.

    Raises:
        EngineError: ENG01 no tokens, ENG02 an id outside the vocabulary (it would end the server), ENG03 impossible
            sampling parameters, ENG72 a prompt that leaves no room for a token.
    """
    where = f"request {request.id}"
    check_ids(request.tokens, vocab_size, where)
    p = request.params
    faults = (
        (p.max_new_tokens < 0, f"max_new_tokens is {p.max_new_tokens}"),
        (not 0 <= p.temperature < float("inf"), f"temperature is {p.temperature}"),
        (not 0 < p.top_p <= 1, f"top_p is {p.top_p}"),
        (p.top_k < 0, f"top_k is {p.top_k}"),
        (not 0 <= request.kept <= len(request.tokens), f"kept is {request.kept} of {len(request.tokens)} tokens"),
        ("" in p.stop, "a stop string is empty"),
    )
    for wrong, text in faults:
        if wrong:
            raise EngineError(
                text,
                code="ENG03",
                where=where,
                why="no token can be drawn so",
                fix="temperature >= 0, 0 < top_p <= 1, top_k >= 0, max_new_tokens >= 0",
            )
    if len(request.tokens) >= context_len:
        raise too_long(f"the prompt has {len(request.tokens)} tokens and the context {context_len}", where)
    return min(p.max_new_tokens, context_len - len(request.tokens))


def check_ids(tokens: Sequence[int], vocab_size: int, where: str) -> None:
    """Raises EngineError ENG01 where there are no tokens, ENG02 where they are no ids of the vocabulary."""
    if not len(tokens):
        raise EngineError("a request needs at least one token", code="ENG01", where=where, fix="give a prompt")
    ids = np.asarray(tokens)
    fix = "encode with the tokenizer of rollout.hf_checkpoint"
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise EngineError("the tokens are no list of ids", code="ENG02", where=where, fix=fix)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise EngineError(
            f"token id {int(ids[at])} at position {at} is outside the vocabulary of {vocab_size}",
            code="ENG02",
            where=where,
            fix=fix,
        )


def too_long(what: str, where: str) -> EngineError:
    """ENG72."""
    return EngineError(
        what,
        code="ENG72",
        where=where,
        why="there is no room for a new token",
        fix="raise rollout.rollout_max_context_len, or set data.rollout_max_prompt_len",
    )


def seed(value: int) -> int:
    """64 bits as SGLang takes them: the same bits, signed (two's complement)."""
    bits = value & (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def body(
    request: GenerateRequest, *, rid: str, limit: int, stream: bool, features: frozenset[str], dp_rank: int | None
) -> dict[str, Any]:
    """What is posted to /generate. Every parameter is named, so that no server's own preference counts."""
    p = request.params
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": p.ignore_eos,
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "n": 1,
        "sampling_seed": seed(request.seed),
    }
    if p.stop and NO_TOKENIZER not in features:
        params["stop"] = list(p.stop)
    if p.stop_token_ids:
        params["stop_token_ids"] = list(p.stop_token_ids)
    return {
        "rid": rid,
        "input_ids": request.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": stream,
        **_rank(dp_rank, features),
    }


def score_body(
    tokens: Sequence[int], start: int, *, rid: str, features: frozenset[str], dp_rank: int | None = None
) -> dict[str, Any]:
    """What is posted to /generate for the log-probs of ``tokens[start:]``."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        **_rank(dp_rank, features),
    }


def _rank(dp_rank: int | None, features: frozenset[str]) -> dict[str, int]:
    if dp_rank is None:
        return {}
    return {"routed_dp_rank" if "routed_dp_rank" in features else "data_parallel_rank": dp_rank}
