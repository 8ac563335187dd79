"""Bodies for SGLang's /generate, checked: a wrong token id would end the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.engines.admission import NO_IDS, check_params, check_vocabulary, room
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
    check_ids(request.tokens, vocab_size, f"request {request.id}")
    check_params(request)
    return room(request, context_len)


def check_ids(tokens: Sequence[int], vocab_size: int, where: str) -> None:
    """Raises EngineError ENG01 where there are no tokens, ENG02 where they are no ids of the vocabulary."""
    if not len(tokens):
        raise EngineError("a request needs at least one token", code="ENG01", where=where, fix="give a prompt")
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise EngineError("the tokens are not a list of ids", code="ENG02", where=where, fix=NO_IDS)
    check_vocabulary(ids, vocab_size, where)


def seed(value: int) -> int:
    """63 bits of it: SGLang wants a signed number of 64, and its router takes no negative one."""
    return value & (1 << 63) - 1


def body(
    request: GenerateRequest,
    *,
    rid: str,
    limit: int,
    stream: bool,
    features: frozenset[str],
    dp_rank: int | None,
    experts: bool = False,
    adapter: str = "",
) -> dict[str, Any]:
    """What is posted to /generate. Every parameter is named, so that no server's own preference counts.

    ``adapter`` is the name of one on the server.
    """
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
        **({"return_routed_experts": True} if experts else {}),
        **_adapter(adapter),
        **_rank(dp_rank, features),
    }


def score_body(
    tokens: Sequence[int],
    start: int,
    *,
    rid: str,
    features: frozenset[str],
    dp_rank: int | None = None,
    adapter: str = "",
) -> dict[str, Any]:
    """What is posted to /generate for the log-probs of ``tokens[start:]``."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        **_adapter(adapter),
        **_rank(dp_rank, features),
    }


def _adapter(adapter: str) -> dict[str, str]:
    return {"lora_path": adapter} if adapter else {}


def _rank(dp_rank: int | None, features: frozenset[str]) -> dict[str, int]:
    if dp_rank is None:
        return {}
    return {"routed_dp_rank" if "routed_dp_rank" in features else "data_parallel_rank": dp_rank}
