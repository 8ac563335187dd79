"""The model that is served: twin module, the plan that runs it, and its cache.

first load -> verify plans against the module's own logits -> allowed row counts
resize -> cache -> prefill, decode, score
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.engines.local import verify
from slime_core.engines.local.adapters import ServedAdapters
from slime_core.engines.local.attention import Segment, decode_rows, pack
from slime_core.engines.local.media import JobMedia, MediaReader, RowMedia, Sight
from slime_core.engines.local.packed import PackedPlan, RescanPlan
from slime_core.engines.local.pages import PagedCache
from slime_core.engines.local.row_counts import RowCounts
from slime_core.engines.local.slots import KVCache, position_bytes
from slime_core.engines.local.twin import Twin
from slime_core.errors import ConfigError, EngineError
from slime_core.kernels.quantised import stored_parts
from slime_core.media.positions import MediaLayout
from slime_core.weights.routers import Routers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.slots import Slots
    from slime_core.types import WeightUpdate
    from slime_core.weights.folder import ModelFolder

SCORE_ROWS = 512


class ServedModel:
    """Everything that touches tensors, for one model. Lives on the torch thread."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        context_len: int,
        dtype: str,
        device: str,
        share: float,
        paged: bool | None = None,
        exact: bool = False,
        routing: bool = False,
        reader: MediaReader | None = None,
    ) -> None:
        self._dtype, self.device = getattr(torch, dtype), device
        self.context_len, self.share = context_len, share
        self._paged = device != "cpu" if paged is None else paged
        self.version = -1
        self._exact = exact  # the same bits as the trainer's
        self._routing = routing  # record choices of experts
        self.routers: Routers | None = None  # of the model, where they are recorded
        self.batch_invariant = exact or not self._paged
        self.counts = RowCounts()
        self.adapters: ServedAdapters | None = None
        self._twin = Twin(folder.config, self._dtype, device, folder.trust_remote_code, joined=self._paged)
        self.reader = reader or MediaReader(MediaLayout.of(folder.config), folder.config.model_type)
        self.sight = Sight(self._twin.model, self.reader, device)
        self.plan: Any = None  # `lean.LeanPlan`, `joined.JoinedPlan`, `packed.PackedPlan` or `packed.RescanPlan`
        self.cache: Any = KVCache((), 0, 0)  # of no layers, until `allocate`
        self._addresses: tuple[int, ...] = ()
        self._resting = False  # copies of weights are dropped until they are used again
        self.holds_cache = True  # False while its memory is released

    @property
    def rescans(self) -> bool:
        """Whether whole prefixes are recomputed because the model fits no faster plan."""
        return isinstance(self.plan, RescanPlan)

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self._paged and not self.rescans

    @property
    def ready(self) -> bool:
        """Whether weights are there and a cache may be."""
        return self._twin.ready and (self.rescans or self.holds_cache)

    @property
    def has_base(self) -> bool:
        """Whether updates may hold adapters alone."""
        return self.adapters is not None and self._twin.ready

    @property
    def position_bytes(self) -> int:
        """What a position takes in all layers; 0 where whole prefixes are recomputed."""
        choices = 2 * math.prod(self.routers.shape) if self.routers is not None else 0
        return position_bytes(self.plan.shapes, self._dtype if self._paged else torch.float32) + choices

    @torch.inference_mode(False)
    def load(self, update: WeightUpdate) -> None:
        """Serve an update's weights; the first one also decides how the model is run."""
        base = bool(update.tensors) or not self.has_base
        if base:
            self._twin.load(update)
        self._load_adapters(update)
        self.sight.forget()
        self.version = update.version
        resting, self._resting = self._resting, False
        if self.plan is not None:
            if base or resting:
                self.plan.refresh()
            return
        with torch.no_grad():
            choice = verify.choose(
                self._twin.model,
                self.context_len,
                self.device,
                paged=self._paged,
                exact=self._exact,
                adapters=self.adapters,
            )
        self.plan, self.counts = choice.plan, choice.counts
        self.batch_invariant = self.batch_invariant and choice.batch_invariant
        if self._routing:
            self.routers = Routers(self._twin.model)
            if not isinstance(self.plan, PackedPlan):
                raise _not_recorded(type(self._twin.model).__name__)
            self.plan.routers = self.routers
        self.moved()

    def _load_adapters(self, update: WeightUpdate) -> None:
        if self.plan is None and update.adapters:
            self.adapters = ServedAdapters(self._twin.model, update.adapters, self._dtype, self.device)
        if self.adapters is not None:
            self.adapters.load(update.adapters)
        elif update.adapters:
            raise EngineError(
                f"version {update.version} is the first with adapters",
                code="ENG86",
                where="the embedded engine",
                why="how the model is computed, and how many rows a pass has, is chosen at the first load",
                fix="send them with the first weights",
            )

    def allocate(self, count: int, tokens: int) -> None:
        """Make an empty cache of ``count`` pages, or slots of ``tokens``, after the one before is gone."""
        self.drop()
        routed = self.routers.shape if self.routers is not None else None
        if self.paged:
            self.cache = PagedCache(self.plan.shapes, count, self._dtype, self.device, routed)
        else:
            self.cache = KVCache(self.plan.shapes, count, tokens, routed)

    def moved(self) -> bool:
        """Whether weights lie elsewhere than at the last call."""
        addresses = tuple(part.data_ptr() for p in self._twin.model.parameters() for part in stored_parts(p))
        if self.adapters is not None:
            addresses += self.adapters.addresses()
        before, self._addresses = self._addresses, addresses
        return before != addresses

    def drop(self) -> None:
        """Release the cache's memory until the next :meth:`allocate`."""
        self.cache = KVCache((), 0, 0)
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def rest(self) -> None:
        """Drop the plan's copies of weights until :meth:`wake` or the next load, which makes them again anyway."""
        if self.plan is not None:
            self.plan.release()
            self._resting = True

    def wake(self) -> None:
        """Make the copies again that :meth:`rest` dropped."""
        if self._resting:
            self.plan.refresh()
            self._resting = False

    def release(self, what: set[str]) -> None:
        """Release memory."""
        if "weights" in what:
            self._twin.release()
            if self.adapters is not None:
                self.adapters.release()
            if self.plan is not None:
                self.plan.release()
        if "kv" in what:
            self.holds_cache = False
            self.drop()
        elif self.device != "cpu":
            torch.cuda.empty_cache()

    def fingerprints(self, adapters: Sequence[str]) -> dict[str, str]:
        """Checksums of what is served, or of these adapters alone."""
        sums = {} if adapters else self._twin.fingerprints()
        return sums | (self.adapters.checksums(adapters or self.adapters.names) if self.adapters is not None else {})

    def chooses(self, owners: NDArray[np.int64]) -> bool:
        """Whether rows of these adapters, by number, need to choose: not where all use the only one."""
        return self.adapters is not None and (len(self.adapters.names) > 1 or bool(owners.any()))

    def use(self, owners: NDArray[np.int64], rows: int = 1) -> None:
        """Let the first of the next pass's ``rows`` use these adapters by number, all where there is one of them."""
        if self.adapters is None:
            return
        if not self.chooses(owners):
            self.adapters.select(None)
        else:
            padding = 0 if len(owners) == 1 else rows - len(owners)
            self.adapters.select(self._to(np.pad(owners, (0, padding))))

    def prefill(self, segments: Sequence[Segment], slots: Slots) -> None:
        """Fill the cache for packed pieces of prompts."""
        ids = np.concatenate([slots.content[s.slot, s.position : s.position + s.end - s.begin] for s in segments])
        media = [slots.media(segment.slot) for segment in segments]
        self._pack(list(segments), ids, media, [slots.adapter[segment.slot] for segment in segments], logits=False)

    def decode(self, slots: Slots, count: int) -> torch.Tensor:
        """Feed every active slot's token; logits [count, V], where rows of idle slots mean nothing."""
        if self.rescans:
            return self._rescan(slots, count)
        parts = []
        for first in range(0, count, self.counts.most):
            at = slice(first, min(first + self.counts.most, count))
            rows = decode_rows(slots.token[at], slots.position[at], slots.active[at], self.cache, self.device, first)
            if (shift := np.where(slots.active[at], slots.shift[at], 0)).any():
                rows.media = RowMedia(rows.position_ids() + self._to(shift))
            self.use(slots.adapter[at], len(rows))
            parts.append(self.plan.forward(rows, self.cache, logits=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sequence_logits(
        self, tokens: NDArray[np.int64], media: JobMedia | None = None, adapter: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of one sequence, in runs of rows: (first position, [n, V])."""
        if self.rescans:
            self.use(np.array([adapter]))
            yield 0, self.plan.logits(self._to(tokens))
            return
        room = min(self.counts.most, SCORE_ROWS)
        for begin in range(0, len(tokens), room):
            part = tokens[begin : begin + room]
            segment = Segment(self.cache.spare, begin, 0, len(part))
            logits = self._pack([segment], part, [media], [adapter], logits=True)
            assert logits is not None
            yield begin, logits[: len(part)]

    def _pack(
        self,
        segments: list[Segment],
        ids: NDArray[np.int64],
        media: Sequence[JobMedia | None],
        adapters: Sequence[int],
        *,
        logits: bool,
    ) -> torch.Tensor | None:
        rows = pack(segments, self.reader.plain(ids), self.counts, self.cache, self.device)
        if any(media):
            spans = [(m, s.position, s.position + s.end - s.begin) for m, s in zip(media, segments, strict=True)]
            rows.media = self.sight.rows(spans, len(rows))
        self.use(np.repeat(adapters, [segment.end - segment.begin for segment in segments]), len(rows))
        return self.plan.forward(rows, self.cache, logits=logits)  # type: ignore[no-any-return]

    def _rescan(self, slots: Slots, count: int) -> torch.Tensor:
        out: torch.Tensor | None = None
        for slot in np.flatnonzero(slots.active[:count]):
            self.use(slots.adapter[slot : slot + 1])
            last: torch.Tensor = self.plan.logits(self._to(slots.content[slot, : slots.position[slot] + 1]))[-1]
            out = last.new_zeros(count, len(last)) if out is None else out
            out[slot] = last
        assert out is not None
        return out

    def _to(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _not_recorded(kind: str) -> ConfigError:
    return ConfigError(
        f"the embedded engine cannot record the experts of {kind}",
        code="CFG04",
        where="train.routing_replay",
        why="its attention cannot be replaced, so every token recomputes its whole sequence",
        fix="--routing-replay policy   or   --rollout-engine sglang",
    )
