"""Pages of keys and values: who holds each and what full ones hold (host), the tensors, and the rows of a pass.

    free --take--> held by sequences, counted --give--> idle, known by content --the longest idle first--> free

A full page is known by its tokens and by what came before them, so sequences that begin alike hold the same pages:
samples of a prompt, turns of a conversation. A pass writes the keys of all its rows before any of them attends, so a
page may be shared from the moment its tokens are scheduled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.kernels.attention import AttentionBatch, paged_attention
from slime_core.kernels.cache import store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.attention import Form
    from slime_core.engines.local.media import RowMedia
    from slime_core.engines.local.slots import LayerShape

PAGE = 16
"""Positions of a page."""

SCRATCH = 0
"""The page of rows that stand for no sequence; nobody holds it."""

Key = tuple[int, bytes]


def pages_of(tokens: int) -> int:
    """Pages that hold ``tokens`` positions."""
    return -(-tokens // PAGE)


class PagePool:
    """Counts of holders, and what full pages hold. ``count`` includes the scratch page."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # without a holder, content known
        self._by_content: dict[Key, int] = {}
        self._keys: dict[int, tuple[Key, int]] = {}  # page -> its key, and the number that its content got
        self._contents = 0  # numbers given to contents

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return len(self._free) + len(self._idle)

    def grow(self, count: int) -> None:
        """At least so many pages."""
        if count <= self.count:
            return
        self._free[:0] = range(count - 1, self.count - 1, -1)
        self._holders += [0] * (count - self.count)
        self.count = count

    def take(self) -> int:
        """A page for one holder, its content lost.

        Raises:
            IndexError: none is available.
        """
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = self._idle.popitem(last=False)[0]
            self._unknow(page)
        else:
            raise IndexError("no page is available")
        self._holders[page] = 1
        return page

    def give(self, pages: Sequence[int]) -> list[int]:
        """End one hold of each page; the ones that nobody holds any more."""
        loose = []
        for page in reversed(pages):  # the end of a sequence is the first to be lost
            self._holders[page] -= 1
            if self._holders[page] == 0:
                loose.append(page)
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        return loose

    def match(self, tokens: NDArray[Any], adapter: int = 0) -> list[int]:
        """Hold the known pages that ``tokens`` begins with under an adapter, in order."""
        pages, before = [], _root(adapter)
        for block in _blocks(tokens):
            page = self._by_content.get((before, block))
            if page is None:
                break
            self._holders[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
            before = self._keys[page][1]
        return pages

    def publish(self, tokens: NDArray[Any], pages: Sequence[int], adapter: int = 0) -> None:
        """Make the full pages among ``pages``, which hold ``tokens`` under an adapter, known."""
        before = _root(adapter)
        for block, page in zip(_blocks(tokens), pages):
            first = self._by_content.get((before, block))
            if first is None:
                if page in self._keys:  # known behind a page that was lost since
                    return
                self._contents += 1
                self._by_content[before, block], self._keys[page] = page, ((before, block), self._contents)
                first = page
            before = self._keys[first][1]

    def lose(self, pages: Sequence[int]) -> None:
        """Forget what these pages, which nobody holds, were known for."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._unknow(page)
                self._free.append(page)

    def forget(self) -> None:
        """New weights: no page is known any more."""
        self._free += self._idle
        self._idle.clear()
        self._by_content.clear()
        self._keys.clear()

    def _unknow(self, page: int) -> None:
        del self._by_content[self._keys.pop(page)[0]]


def _root(adapter: int) -> int:
    """What stands before the first page; contents have numbers above it."""
    return -1 - adapter


def _blocks(tokens: NDArray[Any]) -> Iterator[bytes]:
    data, width = tokens.tobytes(), PAGE * tokens.itemsize
    return (data[begin : begin + width] for begin in range(0, len(data) - width + 1, width))


class PagedCache:
    """Keys and values of every layer, [pages, PAGE, kv heads, head dim] each, and ``choices[0]``, the experts of each
    position, [pages, PAGE, layers, k], where they are recorded."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pages: int,
        dtype: torch.dtype,
        device: str,
        routed: tuple[int, int] | None = None,
    ) -> None:
        self.shapes, self.dtype, self.device = list(shapes), dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for shape in shapes:
            for tensors, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                tensors.append(torch.zeros(pages, PAGE, shape.kv_heads, dim, dtype=dtype, device=device))
        self.choices: list[torch.Tensor] = []
        if routed:
            self.choices.append(torch.zeros(pages, PAGE, *routed, dtype=torch.int16, device=device))

    def grow(self, pages: int) -> None:
        """At least so many pages, layer by layer; what they hold is copied. It may run out of memory and be called
        again."""
        for tensors in (self.keys, self.values, self.choices):
            for layer, old in enumerate(tensors):
                if len(old) < pages:
                    longer = old.new_zeros(pages, *old.shape[1:])
                    longer[: len(old)] = old
                    tensors[layer] = longer

    @torch.inference_mode()  # as the cache was allocated
    def clear(self, pages: Sequence[int]) -> None:
        """Forget pages that may hold numbers that are not finite."""
        for tensor in (*self.keys, *self.values):
            tensor[list(pages)] = 0

    def experts(self, pages: Sequence[int], begin: int, end: int) -> NDArray[np.int16]:
        """[end - begin, layers, k], chosen at these positions of the sequence in ``pages``; waits for its passes."""
        first = begin // PAGE
        rows = self.choices[0][list(pages[first : pages_of(end)])].flatten(0, 1)
        return rows[begin - first * PAGE : end - first * PAGE].cpu().numpy()


@dataclass(slots=True)
class PagedTokens:
    """N tokens for one forward pass, and where each lies."""

    tokens: torch.Tensor  # N, int64
    positions: torch.Tensor  # N, int64
    places: torch.Tensor  # N, int64: page * PAGE + offset
    batch: AttentionBatch
    sampled: torch.Tensor | None = None  # rows whose logits are wanted, int64; None is all
    invariant: bool = False
    media: RowMedia | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def position_ids(self) -> torch.Tensor:
        """N positions as a model may be asked about them."""
        return self.positions

    def write(self, cache: PagedCache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys [N, Hkv, d] and values [N, Hkv, dv]."""
        store(cache.keys[layer], cache.values[layer], self.places, key, value)

    def record(self, cache: PagedCache, choices: torch.Tensor) -> None:
        """Note the experts [N, layers, k] that the rows were routed to."""
        cache.choices[0].flatten(0, 1).index_copy_(0, self.places, choices.to(torch.int16))

    def look(
        self, cache: PagedCache, layer: int, query: torch.Tensor, form: Form, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with queries [N, Hq, d] whose keys and values are written: [N, Hq, dv]."""
        return paged_attention(
            query,
            cache.keys[layer],
            cache.values[layer],
            self.batch,
            scale=form.scale,
            window=form.window,
            softcap=form.softcap,
            sinks=sinks,
            invariant=self.invariant,
        )


@dataclass(slots=True, frozen=True)
class RowLayout:
    """Where the rows of segments of sequences lie: on the host, N rows of S segments."""

    owner: NDArray[np.int64]  # N, the segment's row of the tables
    positions: NDArray[np.int64]  # N
    places: NDArray[np.int64]  # N
    bounds: NDArray[np.int64]  # S + 1


def lay_out(
    owners: NDArray[np.int64], firsts: NDArray[np.int64], counts: NDArray[np.int64], tables: NDArray[np.int64]
) -> RowLayout:
    """Segments of ``counts`` [S] rows from positions ``firsts`` [S] on, whose pages are ``tables[owners]``."""
    bounds = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(owners, counts)
    positions = np.repeat(firsts - bounds[:-1], counts) + np.arange(len(owner))
    places = tables[owner, positions // PAGE] * PAGE + positions % PAGE
    return RowLayout(owner, positions, places, bounds)


def paged_rows(
    tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, sampled: torch.Tensor | None = None
) -> PagedTokens:
    """Rows of a decode step: token i [R] of sequence i at ``positions`` [R], whose pages are ``tables`` [R, pages]."""
    page = tables.gather(1, (positions // PAGE)[:, None])[:, 0].long()
    bounds = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
    batch = AttentionBatch(bounds, (positions + 1).int(), tables, 1)
    return PagedTokens(tokens, positions, page * PAGE + positions % PAGE, batch, sampled)
