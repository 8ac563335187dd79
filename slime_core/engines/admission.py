"""What every engine refuses before it computes: ids that are none, impossible parameters, full contexts."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest, Media

BASE_NAME = "base"  # of adapters: none, where an engine has some
NO_IDS = "encode with the tokenizer of rollout.hf_checkpoint"


def check_vocabulary(ids: NDArray[Any], vocab_size: int, where: str) -> None:
    """Raises EngineError ENG02 where an integer of ``ids``, [T], is no id of the vocabulary."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise EngineError(
            f"token id {int(ids[at])} at position {at} is outside the vocabulary of {vocab_size}",
            code="ENG02",
            where=where,
            fix=NO_IDS,
        )


def check_adapter(name: str, names: Collection[str], where: str) -> None:
    """Raises EngineError ENG09 where ``name`` is none of the adapters ``names``, nor the base beside them."""
    if name and name not in names and (name != BASE_NAME or not names):
        raise EngineError(
            f"no adapter {name!r} is served",
            code="ENG09",
            where=where,
            why=f"served are: {', '.join(names)}" if names else "the engine computes with the base alone",
            fix="a name of train.lora_adapters, with train.lora_sync=adapter",
        )


def score_options(media: Media | None, adapter: str) -> dict[str, Any]:
    """What `Engine.score` is called with beside tokens and start: engines of plugins may take neither."""
    return {name: value for name, value in (("media", media), ("adapter", adapter)) if value}


def check_params(request: GenerateRequest) -> None:
    """Raises EngineError ENG03 for sampling parameters that are impossible."""
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
                where=f"request {request.id}",
                why="no token can be drawn so",
                fix="temperature >= 0, 0 < top_p <= 1, top_k >= 0, max_new_tokens >= 0",
            )


def room(request: GenerateRequest, context_len: int) -> int:
    """How many new tokens a request may have.

    Raises:
        EngineError: ENG72 a prompt that leaves no room for one.
    """
    count = len(request.tokens)
    if count >= context_len:
        raise too_long(f"the prompt has {count} tokens and the context {context_len}", f"request {request.id}")
    return min(request.params.max_new_tokens, context_len - count)


def too_long(what: str, where: str) -> EngineError:
    """ENG72."""
    return EngineError(
        what,
        code="ENG72",
        where=where,
        why="there is no room for a new token",
        fix="raise rollout.rollout_max_context_len, or set data.rollout_max_prompt_len",
    )
