"""Real, small engines and tokenizers for tests of plugins: no torch, no model, no disk.

They keep the protocols' hard promises (partial tokens survive an abort, memory that was given back cannot be used),
so code that passes here breaks no promise of theirs on a cluster.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core.engines.admission import check_adapter
from slime_core.errors import EngineError
from slime_core.protocols import Ability, PauseMode
from slime_core.seeds import seed_of
from slime_core.types import Completion, WeightRoute, WeightUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest, Media, WeightCheck

    Say = Callable[[GenerateRequest], tuple[Sequence[int], Literal["stop", "length", "abort"]]]

MEMORY = {"kv", "weights"}


def _array(tensor: Any) -> NDArray[Any]:
    """A copy of a tensor of either library; numpy has no bfloat16, which float32 holds."""
    return np.array(tensor.detach().float().cpu().numpy() if hasattr(tensor, "detach") else tensor)


def checksum(array: NDArray[Any]) -> str:
    """crc32 of an array's bytes, in hex."""
    return f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


class FakeEngine:
    """Draws uniform tokens: a function of (seed, position) alone, so batches and aborts never change a sample."""

    abilities: frozenset[Ability] = frozenset(
        {"per_sample_seed", "score", "batch_invariant", "live_load", "release", "adapters"}
    )

    def __init__(self, vocab_size: int = 16, stop_token: int = 0, epoch: int = 1) -> None:
        self.version, self.epoch = -1, epoch
        self.vocab_size, self.stop_token = vocab_size, stop_token
        self.tensors: dict[str, NDArray[Any]] = {}
        self.adapters: dict[str, dict[str, NDArray[Any]]] = {}
        self.served: list[str] = []  # request ids in the order in which they ended
        self._resident = set(MEMORY)
        self._running: dict[str, Completion] = {}
        self._aborted: set[str] = set()
        self._paused = False
        self._stirred = asyncio.Event()  # something changed for waiting requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        if self.version < 0:
            raise EngineError("no weights are loaded yet", code="ENG83", where=f"request {request.id}")
        check_adapter(request.adapter, self.adapters, f"request {request.id}")
        out = Completion(id=request.id, tokens=[], log_probs=[], plain_log_probs=[], finish="length", versions=[])
        out.epoch = self.epoch
        self._running[request.id] = out
        try:
            await self._decode(request, out)
        finally:
            del self._running[request.id]
            self._aborted.discard(request.id)
        self.served.append(request.id)
        out.text = " ".join(map(str, out.tokens))
        return out

    async def _decode(self, request: GenerateRequest, out: Completion) -> None:
        while len(out.tokens) < request.params.max_new_tokens:
            await asyncio.sleep(0)
            while self._paused and request.id not in self._aborted:
                self._stirred.clear()
                await self._stirred.wait()
            if request.id in self._aborted:
                out.finish = "abort"
                return
            self._draw(request, out)
            if out.tokens[-1] == self.stop_token or out.tokens[-1] in request.params.stop_token_ids:
                out.finish = "stop"
                return

    def _draw(self, request: GenerateRequest, out: Completion) -> None:
        if self._resident != MEMORY:
            raise EngineError(f"request {request.id} ran while {sorted(MEMORY - self._resident)} were released")
        position = len(request.tokens) + len(out.tokens)
        adapter = self.adapters.get(request.adapter or next(iter(self.adapters), ""), {})
        out.tokens.append(seed_of(request.seed, position, *map(checksum, adapter.values())) % self.vocab_size)
        out.log_probs.append(-float(np.log(self.vocab_size)))
        out.plain_log_probs.append(-float(np.log(self.vocab_size)))
        out.versions.append(self.version)

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """See `protocols.Engine`."""
        check_adapter(adapter, self.adapters, "score")
        return np.full(len(tokens) - start, -np.log(self.vocab_size), dtype=np.float32)

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        completions = [self._running[name] for name in ids if name in self._running]
        self._aborted |= {out.id for out in completions}
        self._stirred.set()
        while any(out.id in self._running for out in completions):
            await asyncio.sleep(0)
        return completions

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`."""
        if "weights" not in self._resident:
            raise EngineError("weights were loaded while their memory was released")
        if update.handle is not None:  # a transfer that needs both sides
            self.tensors = await update.handle.receive()
        elif update.tensors or not update.adapters:
            self.tensors = {name: _array(tensor) for name, tensor in update.tensors.items()}
        elif not self.tensors:
            raise EngineError("an update holds adapters alone, and the engine has no base", code="ENG86")
        self.adapters = {
            name: {key: _array(tensor) for key, tensor in adapter.tensors.items()}
            for name, adapter in update.adapters.items()
        }
        self.version = update.version

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: it copies the tensors, the base of adapters once."""
        base = bool(self.adapters and self.tensors)
        return WeightRoute(transport="tensors", dtype="float32", base=False) if base else None

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """See `protocols.Engine`."""
        tensors = {} if adapters else dict(self.tensors)
        for name in adapters or self.adapters:
            tensors |= {f"{name}/{key}": one for key, one in self.adapters.get(name, {}).items()}
        return {name: checksum(tensor) for name, tensor in tensors.items()}

    async def pause(self, mode: PauseMode) -> None:
        """See `protocols.Engine`."""
        self._paused = True
        if mode == "abort":
            await self.abort(list(self._running))

    async def resume(self) -> None:
        """See `protocols.Engine`."""
        self._paused = False
        self._stirred.set()

    async def release(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        self._resident -= what
        if "weights" in what:
            self.tensors, self.adapters = {}, {}

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        self._resident |= what & MEMORY


class ScriptedEngine(FakeEngine):
    """Answers with what ``say(request)`` returns, token ids and how they end; what is over ``max_new_tokens`` is cut.

    Log-probs are -0.25 at an answer's first token and 1/1024 less at each that follows.

    Example:
        engine = ScriptedEngine(lambda request: (tokenizer.encode("42"), "stop"), vocab_size=len(tokenizer))
    """

    def __init__(self, say: Say, vocab_size: int = 1024, version: int = 0) -> None:
        super().__init__(vocab_size=vocab_size)
        self.say, self.version = say, version
        self.requests: list[GenerateRequest] = []  # every request, in order
        self.answers: list[Completion] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        tokens, finish = self.say(request)
        if len(tokens) > request.params.max_new_tokens:
            tokens, finish = tokens[: request.params.max_new_tokens], "length"
        numbers = [-0.25 - k / 1024 for k in range(len(tokens))]
        done = Completion(
            id=request.id,
            tokens=list(tokens),
            log_probs=numbers,
            plain_log_probs=list(numbers),
            finish=finish,
            versions=[self.version] * len(tokens),
        )
        self.requests.append(replace(request, tokens=list(request.tokens)))
        self.answers.append(done)
        return done


class CharTokenizer:
    """One character a token: the id is its place in the alphabet, 0 ends a text."""

    def __init__(self, alphabet: str = "\n0123456789+-=abc") -> None:
        self.alphabet = alphabet
        self.eos_token_id = 0
        self.vocab_size = len(alphabet)
        self.chat_template = None

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of the known characters."""
        with suppress(ValueError):
            return [self.alphabet.index(char) for char in text]
        raise ValueError(f"{text!r} has characters outside the alphabet {self.alphabet!r}")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return "".join(self.alphabet[i] for i in ids if not (skip_special_tokens and i == self.eos_token_id))


class ChatTokenizer(CharTokenizer):
    """With a chat template: a line ``role: content`` a message."""

    def __init__(self, alphabet: str = "".join(map(chr, range(32, 127))) + "\n") -> None:
        super().__init__(alphabet)
        self.chat_template: Any = "a line a message"

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """The text of a conversation; ``options`` change nothing."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")
