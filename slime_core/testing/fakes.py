"""Real, small implementations of every protocol, for tests of the loop and of plugins: no torch, no model, no disk.

They keep the protocols' hard promises (partial tokens survive an abort, memory that was given back cannot be used,
a transfer needs both sides), so code that passes here breaks no promise of theirs on a cluster.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core import durable
from slime_core.durable import FileMark
from slime_core.errors import EngineError, TrainerError
from slime_core.protocols import Ability, PauseMode, Role
from slime_core.seeds import seed_of
from slime_core.testing.fake_ledger import MemoryLedger as MemoryLedger, Row as Row
from slime_core.types import Completion, WeightUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.transfer import Check as WeightCheck, WeightRoute
    from slime_core.types import Batch, Columns, GenerateRequest

    Say = Callable[[GenerateRequest], tuple[Sequence[int], Literal["stop", "length", "abort"]]]

MEMORY = {"kv", "weights"}
STATE = {"gradients", "optimizer", "parameters"}


def checksum(array: NDArray[Any]) -> str:
    """crc32 of an array's bytes, in hex."""
    return f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


class FakeEngine:
    """Draws uniform tokens: a function of (seed, position) alone, so batches and aborts never change a sample."""

    abilities: frozenset[Ability] = frozenset({"per_sample_seed", "score", "batch_invariant", "live_load", "release"})

    def __init__(self, vocab_size: int = 16, stop_token: int = 0, epoch: int = 1) -> None:
        self.version, self.epoch = -1, epoch
        self.vocab_size, self.stop_token = vocab_size, stop_token
        self.tensors: dict[str, NDArray[Any]] = {}
        self.served: list[str] = []  # request ids in the order in which they ended
        self._held = set(MEMORY)
        self._running: dict[str, Completion] = {}
        self._aborted: set[str] = set()
        self._paused = False
        self._stirred = asyncio.Event()  # something changed for waiting requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        if self.version < 0:
            raise EngineError("no weights are loaded yet", code="ENG83", where=f"request {request.id}")
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
        if self._held != MEMORY:
            raise EngineError(f"request {request.id} ran while {sorted(MEMORY - self._held)} were released")
        position = len(request.tokens) + len(out.tokens)
        out.tokens.append(seed_of(request.seed, position) % self.vocab_size)
        out.log_probs.append(-float(np.log(self.vocab_size)))
        out.plain_log_probs.append(-float(np.log(self.vocab_size)))
        out.versions.append(self.version)

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine`."""
        return np.full(len(tokens) - start, -np.log(self.vocab_size), dtype=np.float32)

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        found = [self._running[name] for name in ids if name in self._running]
        self._aborted |= {out.id for out in found}
        self._stirred.set()
        while any(out.id in self._running for out in found):
            await asyncio.sleep(0)
        return found

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`."""
        if "weights" not in self._held:
            raise EngineError("weights were loaded while their memory was released")
        if isinstance(update.handle, Rendezvous):
            self.tensors = await update.handle.receive()
        else:
            self.tensors = {name: np.array(tensor) for name, tensor in update.tensors.items()}
        self.version = update.version

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: it copies the tensors."""
        return None

    async def fingerprints(self) -> dict[str, str]:
        """See `protocols.Engine`."""
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}

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
        self._held -= what

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        self._held |= what & MEMORY


class ScriptedEngine(FakeEngine):
    """Answers with what ``say(request)`` returns, token ids and how they end; what is over ``max_new_tokens`` is cut.

    Log-probs are -0.25 at an answer's first token and 1/1024 less at each that follows.

    Example:
        engine = ScriptedEngine(lambda request: (tokenizer.encode("42"), "stop"), vocab_size=len(tokenizer))
    """

    def __init__(self, say: Say, vocab_size: int = 1024, version: int = 0) -> None:
        super().__init__(vocab_size=vocab_size)
        self.say, self.version = say, version
        self.requests: list[GenerateRequest] = []  # as they were asked, and what was answered
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


class Rendezvous:
    """A transfer that needs both sides at once, as NCCL does: ``send`` ends only when ``receive`` has begun."""

    def __init__(self) -> None:
        self._arrived, self._sent = asyncio.Event(), asyncio.Event()
        self._tensors: dict[str, NDArray[Any]] = {}

    async def send(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """The trainer's side."""
        await self._arrived.wait()
        self._tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
        self._sent.set()

    async def receive(self) -> dict[str, NDArray[Any]]:
        """The engine's side."""
        self._arrived.set()
        await self._sent.wait()
        return self._tensors


def _write_fake(path: Path, parts: Mapping[str, bytes]) -> dict[str, FileMark]:
    try:
        if not path.exists():
            durable.disk.make_folder(path)
        return {f"{name}.bin": durable.write_file(path / f"{name}.bin", [data]) for name, data in parts.items()}
    except OSError as error:
        raise durable.storage_error(error, path, "the trainer's state cannot be written") from error


class FakeTrainer:
    """Two tensors, a step that is a plain function of the batch's advantages, and every role a trainer can score."""

    def __init__(self, *, rendezvous: bool = False, epoch: int = 1) -> None:
        self.weights = {"embed": np.zeros(4), "head": np.zeros(4)}
        self.stages: list[str] = []
        self.batches: list[list[str]] = []  # sample ids of each step
        self._rendezvous, self._epoch = rendezvous, epoch
        self._held = set(STATE)
        self._transfer: asyncio.Task[None] | None = None
        self._saving: tuple[Path, dict[str, bytes]] | None = None  # the copy that `saved` writes

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        self.stages.append(stage.train.loss_type)

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`: log-probs are -1, the teacher's -2, values 0.5."""
        count = len(batch.loss_mask)
        level = {"policy": -1.0, "old_policy": -1.0, "reference": -1.0, "teacher": -2.0}
        level |= {"float32": -1.0, "bfloat16": -1.0}
        out: dict[str, Columns] = {
            role: {"log_probs": np.full(count, level[role], np.float32)} for role in roles if role != "values"
        }
        if "values" in roles:
            out["values"] = {"values": np.full(count, 0.5, np.float32)}
        return out

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        if self._held != STATE:
            raise TrainerError(f"a step ran while {sorted(STATE - self._held)} were released")
        if self._transfer is not None and not self._transfer.done():
            raise TrainerError("a step ran while a weight transfer was still under way")
        self.apply(self.gradient(batch))
        self.batches.append(list(batch.sample_ids))
        return {"loss": float(np.abs(self.weights["head"]).sum())}

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`: the whole gradient against the sum of each sample's."""
        fast = self.gradient(batch)
        slow = np.sum([self.gradient(batch, i, len(batch)) for i in range(len(batch))], axis=0)
        error = float(np.linalg.norm(fast - slow)) / max(float(np.linalg.norm(slow)), 1e-300)
        return {"gradient_error": error, "loss_error": 0.0, "limit": 1e-9, "gradient_error/head": error}

    def gradient(self, batch: Batch, rank: int = 0, world: int = 1) -> NDArray[np.float64]:
        """This rank's share of the step: samples rank, rank + world, ..."""
        out = np.zeros(4)
        advantages = batch.columns.get("advantages", batch.loss_mask)
        for index in range(rank, len(batch), world):
            part = slice(batch.response_offsets[index], batch.response_offsets[index + 1])
            tokens = batch.tokens[batch.offsets[index + 1] - (part.stop - part.start) : batch.offsets[index + 1]]
            np.add.at(out, tokens % 4, advantages[part] * batch.loss_mask[part])
        return out

    def apply(self, gradient: NDArray[np.float64]) -> None:
        """The optimizer: plain addition."""
        self.weights["embed"] = self.weights["embed"] + gradient
        self.weights["head"] = self.weights["head"] - gradient / 2

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`; with ``rendezvous`` the transfer ends only inside the engine's ``load``."""
        handle = None
        tensors: Mapping[str, NDArray[Any]] = dict(self.weights)
        if self._rendezvous:
            handle = Rendezvous()
            self._transfer = asyncio.create_task(handle.send(tensors))
            tensors = {}
        return WeightUpdate(
            version=version,
            epoch=self._epoch,
            transport="rendezvous" if self._rendezvous else "tensors",
            tensors=tensors,
            fingerprints={name: checksum(tensor) for name, tensor in self.weights.items()},
            handle=handle,
        )

    async def save(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self.saved()
        self._saving = path, {name: w.tobytes() for name, w in self.weights.items()}

    async def saved(self) -> dict[str, FileMark]:
        """See `protocols.Trainer`; a file a tensor."""
        if self._saving is None:
            return {}
        (path, parts), self._saving = self._saving, None
        return await asyncio.to_thread(_write_fake, path, parts)

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        self.weights = {name: np.frombuffer((path / f"{name}.bin").read_bytes()).copy() for name in self.weights}

    async def fingerprint(self) -> str:
        """See `protocols.Trainer`."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode() + b"\0" + self.weights[name].tobytes())
        return digest.hexdigest()

    async def export(self, path: Path) -> None:
        """See `protocols.Trainer`; not a Hugging Face folder, there is no model."""
        path.mkdir(parents=True, exist_ok=True)
        for name, tensor in self.weights.items():
            (path / f"{name}.bin").write_bytes(tensor.tobytes())

    async def release(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        self._held -= what

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        self._held |= what & STATE


class RankedTrainer(FakeTrainer):
    """Several ranks behind one trainer: each computes its share, all apply the sum."""

    def __init__(self, world: int = 2) -> None:
        super().__init__()
        self.ranks = [FakeTrainer() for _ in range(world)]

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        total = sum(rank.gradient(batch, i, len(self.ranks)) for i, rank in enumerate(self.ranks))
        for rank in self.ranks:
            rank.apply(np.asarray(total))
        self.weights = dict(self.ranks[0].weights)
        self.batches.append(list(batch.sample_ids))
        return {"loss": float(np.abs(self.weights["head"]).sum())}

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`; every rank reads."""
        await super().restore(path)
        for rank in self.ranks:
            await rank.restore(path)


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
