"""One request on its way: what it asked for, what it has, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from slime_core.engines.admission import check_params, check_vocabulary, room
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
    check_vocabulary(prompt, vocab_size, where)
    check_params(request)
    limit = room(request, context_len)
    params = request.params
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
    return Job(request=request, future=future, prompt=prompt, limit=limit, stop_ids=stop_ids)
