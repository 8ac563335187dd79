"""Passes over pages: sequences' state lives on the device, and decode steps are replayed from CUDA graphs.

    token, position, sampling parameters, pages of a sequence --pass--> logits of sampled rows --> next token, position

A pass feeds what the one before it drew without the host, which reads draws later, by an asynchronous copy. What
changes between passes (new sequences, new pages, which sequences take part) goes to the device in one copy.

A decode step of a number of rows runs as it is the first time, which compiles kernels; the second time it is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.engines.local.media import RowMedia
from slime_core.engines.local.pages import PAGE, PagedTokens, lay_out
from slime_core.engines.local.slots import up
from slime_core.kernels.attention import AttentionBatch
from slime_core.kernels.sampling import log_softmax_at, sample
from slime_core.kernels.steps import TOKEN, SequenceRows, move_on, read_rows
from slime_core.memory import is_out_of_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.media import JobMedia
    from slime_core.engines.local.served import ServedModel
    from slime_core.engines.local.slots import EngineJob, Slots

    Ints = NDArray[np.int64]

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SCORE_ROWS = 512

RETRY = 1000
"""Steps until a capture that ran out of memory is tried again."""


PassKind = tuple[int, bool]
"""Rows of a decode step, and whether they choose among adapters."""


@dataclass(slots=True, frozen=True)
class PromptPart:
    """Positions [begin, end) of a slot's tokens; ``last``: the next token is drawn after them."""

    slot: int
    begin: int
    end: int
    last: bool


class Draws:
    """What a pass drew, on its way to the host."""

    def __init__(self, out: torch.Tensor) -> None:
        self._host, self._event = out, None
        if out.is_cuda:
            self._host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            self._host.copy_(out, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self, rows: int) -> tuple[Ints, NDArray[np.float32], NDArray[np.float32]]:
        """Tokens, log-probs and plain log-probs of the first ``rows`` rows, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        tokens, log_probs, plain = self._host[:, :rows].numpy()
        return tokens.astype(np.int64), log_probs.view(np.float32), plain.view(np.float32)


class Runner:
    """Runs passes for up to ``sequences`` sequences, whose pages have columns after :meth:`widen`."""

    def __init__(self, served: ServedModel, sequences: int) -> None:
        self._served, self._sequences = served, sequences
        device = served.device
        self._state = torch.zeros(7, sequences + 1, dtype=torch.int64, device=device)  # the last stands for none
        self._shifts = torch.zeros(sequences + 1, dtype=torch.int64, device=device)  # of positions, after pictures
        self._adapters = torch.zeros(sequences + 1, dtype=torch.int64, device=device)
        self._owners = np.zeros(sequences, dtype=np.int64)  # the adapters on the host
        self._tables = torch.zeros(sequences + 1, 0, dtype=torch.int32, device=device)
        self._columns = np.zeros((sequences, 0), dtype=np.int64)  # the tables on the host
        self._index = torch.full((bucket(sequences),), sequences, dtype=torch.int64, device=device)
        self._bounds = torch.arange(len(self._index) + 1, dtype=torch.int32, device=device)
        self._rows = np.empty(0, dtype=np.int64)  # what the index holds
        self._fresh: dict[int, tuple[int, ...]] = {}  # by slot, the state of sequences that the device does not know
        self._marks: dict[tuple[int, int], int] = {}  # by slot and column, pages that its tables do not have
        self._eager: dict[PassKind, int] = {}  # steps that run as they are before one is captured; 1 at first
        self._graphs: dict[PassKind, tuple[Any, torch.Tensor]] = {}
        self._pool: Any = None
        self._captures = served.device != "cpu"

    def enter(self, slot: int, token: int, position: int, job: EngineJob) -> None:
        """A sequence takes a slot: ``token`` at ``position`` is its last."""
        params = job.request.params
        numbers = np.array([params.temperature, params.top_p], dtype=np.float32).view(np.int32)
        seed = int(np.uint64(job.seed).astype(np.int64))
        shift = job.media.shift if job.media else 0
        self._fresh[slot] = (token, position, seed, params.top_k, *numbers.tolist(), 1, shift, job.adapter)
        self._owners[slot] = job.adapter

    def mark(self, slot: int, column: int, page: int) -> None:
        """Page number ``column`` of a slot's sequence is ``page``."""
        self._columns[slot, column] = page
        self._marks[slot, column] = page

    def widen(self, width: int) -> None:
        """Tables of ``width`` pages a sequence, over a cache that may have moved."""
        more = width - self._columns.shape[1]
        columns = np.pad(self._columns, ((0, 0), (0, more)))
        self._tables = torch.nn.functional.pad(self._tables, (0, more))
        self._columns = columns
        self.void()

    def void(self) -> None:
        """Drop captured passes: tensors that they read have moved."""
        self._graphs.clear()
        self._eager.clear()
        self._pool = None  # it ended with its last graph

    def decode(self, slots: Ints) -> Draws:
        """Feed the token of each of these slots and draw its next."""
        count = bucket(len(slots))
        index = np.full(count, self._sequences, dtype=np.int64)
        index[: len(slots)] = slots
        if np.array_equal(index, self._rows):
            self._send()
        else:
            self._index[:count] = self._send(index)[0]
            self._rows = index
        kind = count, self._served.chooses(self._owners[slots])
        graph = self._graphs.get(kind)
        if graph is None and self._captures and self._eager.get(kind, 1) < 1:
            graph = self._captured(kind)
        if graph is None:
            self._eager[kind] = self._eager.get(kind, 1) - 1
            return Draws(self._decode(kind))
        graph[0].replay()
        return Draws(graph[1])

    def mixed(self, slots: Ints, fed: Ints, chunks: Sequence[PromptPart], sequences: Slots) -> Draws | None:
        """Feed the next token of ``slots``, at positions ``fed``, and chunks of prompts, in one pass.

        Draws for ``slots`` and then for every chunk that is its prompt's last; None where there are none.
        """
        owners = np.concatenate([slots, np.array([c.slot for c in chunks], dtype=np.int64)])
        firsts = np.concatenate([fed, np.array([c.begin for c in chunks], dtype=np.int64)])
        counts = np.array([1] * len(slots) + [c.end - c.begin for c in chunks], dtype=np.int64)
        layout = lay_out(owners, firsts, counts, self._columns)
        draws = np.flatnonzero([True] * len(slots) + [c.last for c in chunks])
        tokens, at, where, bounds, lengths, segments, drawing, sampled = self._send(
            self._served.reader.plain(sequences.content[layout.owner, layout.positions]),
            *(layout.positions, layout.places, layout.bounds, firsts + counts),
            *(owners, owners[draws], layout.bounds[1:][draws] - 1),
        )
        if len(slots):
            tokens[: len(slots)] = self._state[TOKEN].index_select(0, segments[: len(slots)])
        tables = self._tables.index_select(0, segments)
        batch = AttentionBatch(bounds.int(), lengths.int(), tables, int(counts.max()))
        rows = PagedTokens(tokens, at, where, batch, sampled, self._invariant)
        media = [sequences.media(owner) for owner in owners]
        if any(media):
            rows.media = self._served.sight.rows(list(zip(media, firsts, firsts + counts, strict=True)), len(rows))
        self._served.use(sequences.adapter[layout.owner], len(rows))
        logits = self._served.plan.forward(rows, self._served.cache, logits=len(draws) > 0)
        if not len(draws):
            return None
        return Draws(self._draw(logits, drawing, read_rows(self._state, self._tables, drawing, PAGE)))

    def score(
        self, tokens: Ints, start: int, pages: Sequence[int], media: JobMedia | None = None, adapter: int = 0
    ) -> NDArray[np.float32]:
        """Plain log-prob of each of ``tokens[start:]``; ``pages`` hold the keys of all but the last."""
        parts = []
        self._served.use(np.array([adapter]))
        tokens = self._served.reader.plain(tokens)
        table = np.array([pages], dtype=np.int64)
        for begin in range(0, len(tokens) - 1, SCORE_ROWS):
            end = min(begin + SCORE_ROWS, len(tokens) - 1)
            first = max(begin, start - 1)
            layout = lay_out(np.zeros(1, np.int64), np.array([begin]), np.array([end - begin]), table)
            ids, at, where, bounds, length, column, sampled, following = self._send(
                *(tokens[begin:end], layout.positions, layout.places, layout.bounds, np.array([end]), table[0]),
                *(np.arange(first, end) - begin, tokens[first + 1 : end + 1]),
            )
            batch = AttentionBatch(bounds.int(), length.int(), column.int()[None], end - begin)
            rows = PagedTokens(ids, at, where, batch, sampled, self._invariant)
            if media is not None:
                rows.media = self._served.sight.rows([(media, begin, end)], len(rows))
            logits = self._served.plan.forward(rows, self._served.cache, logits=end > first)
            if end > first:
                parts.append(log_softmax_at(logits, following))
        return torch.cat(parts).cpu().numpy()

    @property
    def _invariant(self) -> bool:
        return bool(getattr(self._served.plan, "invariant", False))

    def _decode(self, kind: PassKind) -> torch.Tensor:
        count, chooses = kind
        index = self._index[:count]
        if adapters := self._served.adapters:
            adapters.select(self._adapters.index_select(0, index) if chooses else None)
        state = read_rows(self._state, self._tables, index, PAGE)
        batch = AttentionBatch(self._bounds[: count + 1], state.lengths, state.tables, 1)
        rows = PagedTokens(state.tokens, state.positions, state.places, batch, None, self._invariant)
        if self._served.sight.three_axes:
            rows.media = RowMedia(state.positions + self._shifts.index_select(0, index))
        return self._draw(self._served.plan.forward(rows, self._served.cache), index, state)

    def _draw(self, logits: torch.Tensor, index: torch.Tensor, state: SequenceRows) -> torch.Tensor:
        """Draw from [R, V] for the slots ``index`` [R]; as int32 bits [3, R]."""
        draws = sample(logits, state.seeds, state.following, state.temperature, state.top_k, state.top_p)
        return move_on(self._state, index, state, *draws)

    def _captured(self, kind: PassKind) -> tuple[Any, torch.Tensor] | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = self._decode(kind)
        except Exception as error:
            torch.cuda.set_stream(stream)  # a capture that cannot end leaves its own
            self._not_captured(kind, error)
            return None
        self._graphs[kind] = graph, out
        return self._graphs[kind]

    def _not_captured(self, kind: PassKind, error: Exception) -> None:
        self._captures = is_out_of_memory(error) or is_out_of_memory(error.__context__ or error)
        self._eager[kind] = RETRY
        if not self._graphs:
            self._pool = None
        log.warning("a decode step of %d rows of %s is not captured: %s", kind[0], self._served.plan.name, error)

    def _send(self, *arrays: Ints) -> Sequence[torch.Tensor]:
        """Arrays as int64 tensors on the device, and whatever it does not know yet, in one copy."""
        fresh = np.array([(slot, *state) for slot, state in self._fresh.items()], dtype=np.int64).reshape(-1, 10)
        width = self._columns.shape[1]
        places = [(slot * width + column, page) for (slot, column), page in self._marks.items()]
        marks = np.array(places, dtype=np.int64).reshape(-1, 2)
        parts = [*arrays, fresh.T.ravel(), marks.T.ravel()]
        ends = np.cumsum([up(part.size, 2) for part in parts])  # aligned to 16 bytes: kernels are compiled once
        if not ends[-1]:
            return ()
        flat = torch.empty(int(ends[-1]), dtype=torch.int64, pin_memory=self._served.device != "cpu")
        spans = [slice(end - up(part.size, 2), end - part.size % 2) for end, part in zip(ends, parts, strict=True)]
        for span, part in zip(spans, parts, strict=True):
            flat.numpy()[span] = part
        device = flat.to(self._served.device, non_blocking=True)
        tensors = [device[span] for span in spans]
        if len(fresh):
            rows = tensors[-2].view(10, -1)
            self._state[:, rows[0]], self._shifts[rows[0]], self._adapters[rows[0]] = rows[1:8], rows[8], rows[9]
        if len(marks):
            rows = tensors[-1].view(2, -1)
            self._tables.view(-1)[rows[0]] = rows[1].int()
        self._fresh.clear()
        self._marks.clear()
        return tensors[: len(arrays)]


def bucket(rows: int) -> int:
    """Rows that a captured step has, for so many sequences."""
    return next((count for count in BUCKETS if count >= rows), -(-rows // BUCKETS[-1]) * BUCKETS[-1])
