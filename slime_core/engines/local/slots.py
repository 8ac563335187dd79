"""The slots of the engine: the sequence in each, its arrays on the host, and its keys and values.

    Job (a request on its way) --take--> Slots (one row a slot) + KVCache (one slot a row) --give_up--> Job

``content[slot, :filled[slot]]`` are the tokens whose keys and values the cache holds there; a slot keeps them after
its sequence has ended, so that a request that begins alike copies them (samples of a group, turns of a conversation).

The cache grows with the longest sequence:

    keys[layer], values[layer]: [slots + 1, kv heads, length, head dim]; the last slot is for scoring and probes
    by_position[layer]: both as one tensor [slots + 1, length, 2, kv heads, head dim], where they are of one width
    choices[0]: [slots + 1, layers, length, k], the experts of each position, where they are recorded; int16

It is float32 whatever the compute dtype (a bfloat16 key is a float32 key), and the memory's pages are only touched as
sequences grow. The last position of every slot is scratch: rows that stand for no sequence write there, and nothing
ever attends to it. On a GPU keys and values lie in pages (`pages.py`), and nothing is held in these tensors.

How long slots are and how many there are is what requests need, within the memory that is there:

    all sequences, as long as the longest request may get     where that fits
    all sequences, as long as they are now                    where that fits; longer as they grow
    fewer sequences
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from slime_core.engines.admission import check_params, check_vocabulary, room
from slime_core.errors import EngineError
from slime_core.memory import available_memory, free_gpu_memory
from slime_core.types import Completion

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from slime_core.engines.local.media import JobMedia, MediaReader
    from slime_core.types import GenerateRequest

BLOCK = 32
"""Lengths that attention sees are multiples of this many positions. Below 400 multiplications torch's batched product
uses a kernel of its own, with other bits: 32 columns of 13 or more numbers stay above."""

SHARE = 0.5
"""Part of the free memory that the cache may take: the trainer's gradients and optimizer come after it."""

SHARE_ALONE = 0.85
"""The same on a GPU that no trainer uses."""

STEP = 4 * BLOCK
"""Slots grow by whole steps, so that prompts of slightly different lengths do not each make them longer."""

NO_STOP = -1


@dataclass(slots=True, eq=False)
class EngineJob:
    """A request, what it has so far, and the future that its caller waits on."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    prompt: NDArray[np.int64]  # placeholders of pictures replaced: see `media`
    limit: int  # new tokens, at most
    stop_ids: tuple[int, ...]
    completion: Completion  # with the tokens of slots that it has left
    media: JobMedia | None = None
    adapter: int = 0  # number of it, or `adapters.BASE`; 0 where there is none
    error: EngineError | None = None
    start: float = field(default_factory=time.monotonic)
    slot_time: float = 0.0  # when it first had a slot
    token_time: float = 0.0  # when its first token was drawn

    @property
    def seed(self) -> int:
        """64 bits, unsigned."""
        return self.request.seed & ((1 << 64) - 1)

    def history(self) -> NDArray[np.int64]:
        """Prompt and new tokens."""
        return np.concatenate([self.prompt, np.asarray(self.completion.tokens, dtype=np.int64)])

    def earlier(self, count: int) -> list[int]:
        """The last ``count`` tokens of this response that were made before it took its slot, or by an aborted try."""
        prefix = self.prompt[len(self.prompt) - self.request.kept :].tolist() if self.request.kept else []
        return [*prefix, *self.completion.tokens][-count:] if count else []


def make_job(
    request: GenerateRequest,
    future: asyncio.Future[Completion],
    *,
    vocab_size: int,
    context_len: int,
    eos: tuple[int, ...],
    epoch: int = 0,
    reader: MediaReader | None = None,
) -> EngineJob:
    """Check a request and turn it into a job.

    Raises:
        EngineError: ENG01 no tokens, ENG02 an id outside the vocabulary, ENG03 impossible sampling parameters,
            ENG72 a prompt that leaves no room for a token; and those of `media.MediaReader.read`.
    """
    where = f"request {request.id}"
    if not request.tokens:
        raise EngineError("a request needs at least one token", code="ENG01", where=where, fix="give a prompt")
    try:
        prompt = np.asarray(request.tokens, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise EngineError(
            "the tokens are not a list of ids", code="ENG02", where=where, why=str(error), fix="give integers"
        ) from error
    check_vocabulary(prompt, vocab_size, where)
    check_params(request)
    limit = room(request, context_len)
    media = None if reader is None else reader.read(prompt, request.media, where)
    params = request.params
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
    completion = Completion(
        id=request.id, tokens=[], log_probs=[], plain_log_probs=[], finish="length", versions=[], epoch=epoch
    )
    return EngineJob(
        request=request,
        future=future,
        prompt=prompt if media is None else media.ids,
        limit=limit,
        stop_ids=stop_ids,
        completion=completion,
        media=media,
    )


class Slots:
    """Arrays over ``count`` slots and ``length`` positions."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length
        self.jobs: list[EngineJob | None] = [None] * count
        self.active = np.zeros(count, dtype=bool)
        self.position = np.zeros(count, dtype=np.int64)  # of the token that the next step feeds
        self.token = np.zeros(count, dtype=np.int64)  # that token
        self.start = np.zeros(count, dtype=np.int64)  # position of the first new token since the slot was taken
        self.budget = np.zeros(count, dtype=np.int64)  # new tokens still allowed
        self.seed = np.zeros(count, dtype=np.uint64)
        self.temperature = np.ones(count, dtype=np.float32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.shaped = np.zeros(count, dtype=bool)  # draws from another distribution than the plain softmax
        self.stops = np.full((count, 4), NO_STOP, dtype=np.int64)
        self.texts = np.zeros(count, dtype=bool)  # has stop strings
        self.filled = np.zeros(count, dtype=np.int64)
        self.shift = np.zeros(count, dtype=np.int64)  # of positions on the model's axes, after pictures
        self.adapter = np.zeros(count, dtype=np.int64)  # whose keys and values the cache holds, as in `EngineJob`
        self.mixed = np.zeros(count, dtype=bool)  # its cache was made by several weights: never reused
        self.content = np.zeros((count, length), dtype=np.int64)
        self.log_probs = np.zeros((count, length), dtype=np.float32)  # by absolute position
        self.plain = np.zeros((count, length), dtype=np.float32)
        self.versions = np.zeros((count, length), dtype=np.int64)

    def grow(self, length: int) -> None:
        """Room for more positions a slot."""
        for name in ("content", "log_probs", "plain", "versions"):
            table = getattr(self, name)
            longer = np.zeros((self.count, length), dtype=table.dtype)
            longer[:, : self.length] = table
            setattr(self, name, longer)
        self.length = length

    def lengths(self) -> NDArray[np.int64]:
        """For every slot, how many positions of its cache are written."""
        return np.where(self.active, np.maximum(self.position, self.filled), self.filled)

    def media(self, slot: int) -> JobMedia | None:
        """Pictures of the sequence in a slot."""
        job = self.jobs[slot]
        return None if job is None else job.media

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], version: int) -> None:
        """Note that each of these slots was fed and drew a token."""
        self.filled[rows] = np.where(self.mixed[rows], 0, self.position[rows] + 1)
        self.position[rows] += 1
        self.token[rows] = tokens
        self.budget[rows] -= 1
        positions = self.position[rows]
        self.content[rows, positions] = tokens
        self.versions[rows, positions] = version

    @property
    def rows(self) -> int:
        """One past the highest active slot."""
        return int(np.flatnonzero(self.active)[-1]) + 1 if self.active.any() else 0

    def free(self) -> NDArray[np.int64]:
        """Slots without a sequence, ascending."""
        return np.flatnonzero(~self.active)

    def take(self, slot: int, job: EngineJob, tokens: NDArray[np.int64]) -> None:
        """Give a slot to a job whose history is ``tokens``; the cache holds nothing for it yet."""
        params = job.request.params
        last = len(tokens) - 1
        self.jobs[slot] = job
        job.slot_time = job.slot_time or time.monotonic()
        self.active[slot] = True
        self.position[slot], self.token[slot], self.start[slot] = last, tokens[last], last + 1
        self.budget[slot] = job.limit - len(job.completion.tokens)
        self.seed[slot] = job.seed
        self.shift[slot] = job.media.shift if job.media else 0
        self.adapter[slot] = job.adapter
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = params.temperature, params.top_p, params.top_k
        self.shaped[slot] = params.temperature != 1 or params.top_p < 1 or params.top_k > 0
        if len(job.stop_ids) > self.stops.shape[1]:
            wider = np.full((self.count, up(len(job.stop_ids), 4)), NO_STOP, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_STOP
        self.stops[slot, : len(job.stop_ids)] = job.stop_ids
        self.texts[slot] = bool(params.stop)
        self.content[slot, : last + 1] = tokens
        self.filled[slot] = last
        self.mixed[slot] = False

    def give_up(self, slot: int) -> EngineJob:
        """Take a job off its slot, moving what was drawn into it. The cache keeps what it holds."""
        job = self.jobs[slot]
        assert job is not None
        new = slice(int(self.start[slot]), int(self.position[slot]) + 1)
        job.completion.tokens += self.content[slot, new].tolist()
        job.completion.log_probs += self.log_probs[slot, new].tolist()
        job.completion.plain_log_probs += self.plain[slot, new].tolist()
        job.completion.versions += self.versions[slot, new].tolist()
        self.jobs[slot] = None
        self.active[slot] = False
        return job

    def new_tokens(self, slot: int, count: int) -> list[int]:
        """The last ``count`` tokens drawn in this slot."""
        end = int(self.position[slot]) + 1
        return self.content[slot, max(int(self.start[slot]), end - count) : end].tolist()  # type: ignore[no-any-return]

    def move(self, source: int, target: int) -> None:
        """Move a sequence to a free slot (the cache is moved by the caller)."""
        self.jobs[target], self.jobs[source] = self.jobs[source], None
        for array in (
            *(self.active, self.position, self.token, self.start, self.budget, self.seed, self.temperature),
            *(
                self.top_p,
                self.top_k,
                self.shaped,
                self.stops,
                self.texts,
                self.filled,
                self.mixed,
                self.shift,
                self.adapter,
            ),
        ):
            array[target] = array[source]
        end = int(self.position[source]) + 1
        for table in (self.content, self.log_probs, self.plain, self.versions):
            table[target, :end] = table[source, :end]
        self.active[source] = False

    def shared(self, tokens: NDArray[np.int64], adapter: int = 0) -> NDArray[np.int64]:
        """For every slot, how many leading tokens its cache has in common with ``tokens`` under an adapter."""
        if not len(tokens):
            return np.zeros(self.count, dtype=np.int64)
        differs = self.content[:, : len(tokens)] != tokens
        first = np.where(differs.any(1), differs.argmax(1), len(tokens))
        return np.where(self.adapter == adapter, np.minimum(first, self.filled), 0)

    def forget(self) -> None:
        """The cache holds nothing that may be reused."""
        self.filled[:] = 0
        self.mixed[:] = True


def up(count: int, step: int) -> int:
    """``count`` rounded up to a multiple of ``step``."""
    return -(-count // step) * step


def slot_length(context_len: int) -> int:
    """Positions of a slot: whole blocks, and one of scratch."""
    return up(context_len, BLOCK) + 1


@dataclass(slots=True, frozen=True)
class LayerShape:
    """Heads and widths of one layer's cache."""

    kv_heads: int
    key_dim: int
    value_dim: int


def position_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one position of one sequence, in all layers."""
    return sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes) * dtype.itemsize


def free_memory(device: str, own_bytes: int) -> int:
    """Bytes that a cache may take in place of one of ``own_bytes`` bytes."""
    if device == "cpu":
        return available_memory() + own_bytes
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return free_gpu_memory() + cached + own_bytes


def fitting(
    need: int, most: int, *, sequences: int, tokens: int, context_len: int, positions: float
) -> tuple[int, int]:
    """Sequences at once and tokens of a slot for sequences of ``need`` tokens that may get ``most``.

    ``sequences`` is how many may run, ``tokens`` what a slot has now, ``positions`` what memory holds in all.
    """
    most_needed = min(context_len, up(max(need, most), STEP))
    part = min(most_needed, up(max(need, tokens + tokens // 2), STEP))
    for length in (most_needed, part, need):
        if (sequences + 1) * slot_length(length) <= positions:
            return sequences, length
    for length in (part, need):
        fewer = int(positions // slot_length(length)) - 1
        if fewer >= 1:
            return fewer, length
    return 1, need


def check_size(tokens: int, position_bytes: int, memory: int) -> None:
    """One sequence of ``tokens`` and the spare slot fit.

    Raises:
        EngineError: ENG05.
    """
    size = 2 * slot_length(tokens) * position_bytes
    if size > memory:
        raise EngineError(
            f"the KV cache of a sequence of {tokens} tokens needs {size / 2**30:.1f} GiB",
            code="ENG05",
            why=f"{memory / 2**30:.1f} GiB are free",
            fix="lower rollout.rollout_max_context_len or rollout.rollout_max_response_len, or take a smaller model",
        )


class KVCache:
    """Keys and values of ``slots`` sequences and one spare slot, and choices of experts of shape ``routed``."""

    def __init__(
        self, shapes: Sequence[LayerShape], slots: int, context_len: int, routed: tuple[int, int] | None = None
    ) -> None:
        self.shapes = list(shapes)
        self.slots = slots
        self.spare = slots
        self.length = slot_length(context_len)
        self.by_position: dict[int, torch.Tensor] = {}  # of layers whose keys and values are of one width
        self._front: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, of one size
        self._front_size = (0, 0, 0)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer, shape in enumerate(shapes):
            self.keys.append(torch.empty(0))
            self.values.append(torch.empty(0))
            self._place(layer, shape)
        self.choices = [self._no_choices(*routed)] if routed else []

    @property
    def scratch(self) -> int:
        """The position that stands for no sequence."""
        return self.length - 1

    def grow(self, context_len: int, used: Sequence[int]) -> None:
        """Make slots longer, layer by layer; slot i holds ``used[i]`` positions, the rest is not copied."""
        self.length = slot_length(context_len)
        self._front_size = (0, 0, 0)
        for layer, shape in enumerate(self.shapes):
            before = self.keys[layer], self.values[layer]
            self._place(layer, shape)
            for old, new in zip(before, (self.keys[layer], self.values[layer]), strict=True):
                for slot, count in enumerate(used):
                    new[slot, :, :count] = old[slot, :, :count]
        for number, chosen in enumerate(self.choices):
            self.choices[number] = self._no_choices(chosen.shape[1], chosen.shape[3])
            for slot, count in enumerate(used):
                self.choices[number][slot, :, :count] = chosen[slot, :, :count]

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Copy positions [begin, end) from one slot to another."""
        for tensor in (*self.keys, *self.values, *self.choices):
            tensor[target, :, begin:end] = tensor[source, :, begin:end]

    @torch.inference_mode()  # as the cache was allocated
    def clear(self, slot: int) -> None:
        """Forget a slot that may hold numbers that are not finite: a masked NaN would still reach the sum."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()

    def front(self, layer: int, first: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``length`` positions of ``count`` slots: keys [count * kv heads, d, length], values [..., dv]."""
        if self._front_size != (first, count, length):
            self._front, self._front_size = {}, (first, count, length)
        if layer not in self._front:
            k, v = (t[first : first + count, :, :length].flatten(0, 1) for t in (self.keys[layer], self.values[layer]))
            self._front[layer] = k.transpose(1, 2), v
        return self._front[layer]

    def experts(self, slot: int, begin: int, end: int) -> NDArray[np.int16]:
        """[end - begin, layers, k], chosen at these positions of a slot."""
        return self.choices[0][slot, :, begin:end].transpose(0, 1).numpy().copy()

    def _no_choices(self, layers: int, top_k: int) -> torch.Tensor:
        return torch.zeros(self.slots + 1, layers, self.length, top_k, dtype=torch.int16)

    def _place(self, layer: int, shape: LayerShape) -> None:
        if shape.key_dim == shape.value_dim:
            joint = self._zeros(2, shape.kv_heads, shape.key_dim)
            self.keys[layer], self.values[layer] = joint
            self.by_position[layer] = joint.permute(1, 3, 0, 2, 4)
        else:
            self.keys[layer] = self._zeros(1, shape.kv_heads, shape.key_dim)[0]
            self.values[layer] = self._zeros(1, shape.kv_heads, shape.value_dim)[0]

    def _zeros(self, kinds: int, heads: int, dim: int) -> torch.Tensor:
        shape = (kinds, self.slots + 1, heads, self.length, dim)
        pages = mmap.mmap(-1, 4 * int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # one holds 2 MiB of positions that no sequence may reach
        return torch.from_numpy(np.frombuffer(pages, dtype=np.float32)).view(shape)
