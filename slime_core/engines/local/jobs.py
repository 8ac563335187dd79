"""One request on its way: what it asked for, what it has, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from slime_core.engines.local.sampling import MASK64
from slime_core.errors import EngineError
from slime_core.types import Completion

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request, its tokens so far, and the future that its caller waits on."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    prompt: NDArray[np.int64]
    limit: int  # new tokens, at most
    stop_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)  # new ones, kept when the slot is given up
    log_probs: list[float] = field(default_factory=list)
    plain_log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "abort"] = "length"
    text: str = ""
    error: EngineError | None = None

    @property
    def seed(self) -> int:
        """64 bits, unsigned."""
        return self.request.seed & MASK64

    def history(self) -> NDArray[np.int64]:
        """Prompt and new tokens."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int64)])

    def earlier(self, count: int) -> list[int]:
        """The last ``count`` tokens of this response that were made before its present seat, or by an aborted try."""
        kept = self.prompt[len(self.prompt) - self.request.kept :].tolist() if self.request.kept else []
        return [*kept, *self.tokens][-count:] if count else []

    def completion(self, epoch: int) -> Completion:
        """What the caller gets."""
        return Completion(
            id=self.request.id,
            tokens=self.tokens,
            log_probs=self.log_probs,
            plain_log_probs=self.plain_log_probs,
            finish=self.finish,
            versions=self.versions,
            epoch=epoch,
            text=self.text,
        )


def make_job(
    request: GenerateRequest,
    future: asyncio.Future[Completion],
    *,
    vocab_size: int,
    context_len: int,
    eos: tuple[int, ...],
) -> Job:
    """Check a request and turn it into a job.

    Raises:
        EngineError: ENG01 no tokens, ENG02 an id outside the vocabulary, ENG03 impossible sampling parameters,
            ENG72 a prompt that leaves no room for a token.
    """
    where = f"request {request.id}"
    if not request.tokens:
        raise EngineError("a request needs at least one token", code="ENG01", where=where, fix="give a prompt")
    try:
        prompt = np.asarray(request.tokens, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise EngineError(
            "the tokens are no list of ids", code="ENG02", where=where, why=str(error), fix="give integers"
        ) from error
    check_ids(prompt, vocab_size, where)
    params = request.params
    _check_params(request)
    if len(prompt) >= context_len:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens and the context {context_len}",
            code="ENG72",
            where=where,
            why="there is no room for a new token",
            fix="raise rollout.rollout_max_context_len, or set data.rollout_max_prompt_len",
        )
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
    limit = min(params.max_new_tokens, context_len - len(prompt))
    return Job(request=request, future=future, prompt=prompt, limit=limit, stop_ids=stop_ids)


def check_ids(tokens: NDArray[np.int64], vocab_size: int, where: str) -> None:
    """Raises EngineError ENG02 where an id is outside the vocabulary."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise EngineError(
            f"token id {int(tokens[at])} at position {at} is outside the vocabulary of {vocab_size}",
            code="ENG02",
            where=where,
            fix="encode with the tokenizer of rollout.hf_checkpoint",
        )


def _check_params(request: GenerateRequest) -> None:
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
