"""Choice of the fastest plan whose logits are the module's own, and whether its rows are independent.

Two short sequences are run as the engine will run them: packed prefill, then one decode step side by side. Their last
logits must be those of the module run on each sequence alone; and for batch invariance the bits must be the same when
the sequences run one at a time and in other slots.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.engines.local.adapters import ServedAdapters
from slime_core.engines.local.attention import Segment, decode_rows, pack
from slime_core.engines.local.joined import JoinedPlan
from slime_core.engines.local.lean import LeanPlan
from slime_core.engines.local.media import MediaReader, Sight
from slime_core.engines.local.packed import PackedPlan, RescanPlan, Unfit, moving_rope
from slime_core.engines.local.pages import PAGE, PagedCache, PagedTokens, lay_out, paged_rows, pages_of
from slime_core.engines.local.row_counts import RowCounts, measure
from slime_core.engines.local.slots import KVCache
from slime_core.errors import ConfigError
from slime_core.kernels.attention import AttentionBatch
from slime_core.media.features import own_logits, picture_probe, text_model
from slime_core.media.positions import MediaLayout
from slime_core.types import Media

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
"""Largest difference of logits, relative to the largest logit."""

LENGTHS = (5, 11, 40)
DRAWS = 3
"""Sequences of each length in half precision where tokens choose experts: rounding may send a token to another."""

LONGEST = 512
"""A sliding window up to this is exceeded by the last sequence."""

TRIAL_CHUNK = 24
"""Tokens of a prompt that one pass over pages computes."""


@dataclass(slots=True)
class PlanChoice:
    """The plan, the counts of rows that it may have, and whether they are independent."""

    plan: Any
    counts: RowCounts
    batch_invariant: bool


def choose(
    model: nn.Module,
    context_len: int,
    device: str,
    *,
    paged: bool = False,
    exact: bool = False,
    adapters: ServedAdapters | None = None,
) -> PlanChoice:
    """Try plans from the fastest; the last one, recomputing prefixes, is right for every model.

    Raises:
        ConfigError: CFG04 ``exact`` is asked for, and the model does not run through the kernels that have it.
    """
    sequences = _probe(model, context_len, device)
    expected = [RescanPlan(model).logits(tokens)[-1] for tokens in sequences]
    kind = type(model).__name__
    picture = PictureTrial(model, device) if MediaLayout.of(model.config) is not None else None
    text = text_model(model)
    before = getattr(text.config, "_attn_implementation", None)
    joined = partial(JoinedPlan, model, adapters, exact=exact)
    lean: Callable[[], Any] = joined if paged else partial(LeanPlan, model, adapters)
    makers: tuple[Callable[[], Any], ...] = (lean,) if exact else (lean, lambda: PackedPlan(model, device))
    reasons = [reason] if (reason := moving_rope(model.config, context_len)) else []
    for make in () if reasons else makers:
        try:
            choice = (_tried_over_pages if paged else _tried)(make(), sequences, expected)
            if picture is not None:
                picture.check(choice, paged=paged)
        except Exception as reason:  # whatever a strange architecture raises; the last plan runs it as it is
            reasons.append(str(reason) or type(reason).__name__)
            if getattr(text.config, "_attn_implementation", None) != before:
                text.set_attn_implementation(before)
            continue
        if not choice.batch_invariant:
            log.warning("%s: rows of this model depend on their neighbours; batch invariance is off", kind)
        break
    else:
        if exact:
            raise _not_exact(kind, reasons)
        choice = PlanChoice(RescanPlan(model), RowCounts(), batch_invariant=device == "cpu")
        log.warning("%s: every token recomputes its whole sequence, which is slow: %s", kind, reasons[-1])
    for text in reasons:
        log.info("%s: %s; running it as %s", kind, text, choice.plan.name)
    return choice


def _not_exact(kind: str, reasons: list[str]) -> ConfigError:
    return ConfigError(
        f"{kind} cannot be served with train.true_on_policy_mode",
        code="CFG04",
        where="train.true_on_policy_mode",
        why="; ".join(reasons),
        fix="--no-true-on-policy-mode",
    )


def _tried(plan: Any, sequences: list[torch.Tensor], expected: list[torch.Tensor]) -> PlanChoice:
    threads = torch.get_num_threads()
    trial = _Trial(plan, measure(plan.products(), threads), max(map(len, sequences)))
    logits = trial.together(sequences)
    _compare(logits, expected)
    independent = (threads <= 2 or not plan.hidden_widths) and trial.independent(sequences, logits)
    return PlanChoice(plan, trial.counts, batch_invariant=independent)


def _tried_over_pages(plan: Any, sequences: list[torch.Tensor], expected: list[torch.Tensor]) -> PlanChoice:
    """Prompts in chunks beside each other, then one decode step; what bits depend on is not looked at."""
    device, longest = sequences[0].device, max(map(len, sequences))
    tables = np.arange(1, len(sequences) * pages_of(longest) + 1).reshape(len(sequences), -1)
    cache = PagedCache(plan.shapes, tables.size + 1, expected[0].dtype, str(device))
    plan.reach(tables.shape[1] * PAGE)
    columns = torch.from_numpy(tables).to(device).int()
    for begin in range(0, longest - 1, TRIAL_CHUNK):
        parts = [(i, tokens[begin:-1][:TRIAL_CHUNK]) for i, tokens in enumerate(sequences) if len(tokens) > begin + 1]
        owners, counts = np.array([i for i, _ in parts]), np.array([len(part) for _, part in parts])
        layout = lay_out(owners, np.full(len(parts), begin), counts, tables)
        positions, places, bounds, at, lengths = (
            torch.from_numpy(array).to(device)
            for array in (layout.positions, layout.places, layout.bounds, owners, begin + counts)
        )
        batch = AttentionBatch(bounds.int(), lengths.int(), columns[at], int(counts.max()))
        rows = PagedTokens(torch.cat([part for _, part in parts]), positions, places, batch)
        plan.forward(rows, cache, logits=False)
    last = torch.stack([tokens[-1] for tokens in sequences])
    positions = torch.tensor([len(tokens) - 1 for tokens in sequences], device=device)
    _compare(list(plan.forward(paged_rows(last, positions, columns), cache)), expected)
    return PlanChoice(plan, RowCounts(), batch_invariant=True)


def _probe(model: nn.Module, context_len: int, device: str) -> list[torch.Tensor]:
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    draws = np.random.default_rng(0)
    window = getattr(config, "sliding_window", None) or 0
    lengths = (*LENGTHS[:-1], max(LENGTHS[-1], window + 8 if window <= LONGEST else 0))
    parameters = list(text_model(model).parameters())
    routed = any(parameter.ndim > 2 for parameter in parameters) and parameters[0].dtype != torch.float32
    return [
        torch.from_numpy(draws.integers(0, config.vocab_size, max(2, min(n, context_len)))).to(device)
        for n in lengths * (DRAWS if routed else 1)
    ]


class PictureTrial:
    """A sequence with a picture, whose logits must be those of the module."""

    def __init__(self, model: nn.Module, device: str) -> None:
        layout = MediaLayout.of(model.config)
        assert layout is not None
        self._device, self._tokens = device, np.empty(0, dtype=np.int64)
        self._tokens, arrays = picture_probe(model.config, layout)
        reader = MediaReader(layout, type(model).__name__)
        self._media = reader.read(self._tokens, Media(arrays=arrays), "the trial")
        self._sight = Sight(model, reader, device)
        self._expected = own_logits(model, layout, self._tokens, arrays)

    def check(self, choice: PlanChoice, *, paged: bool) -> None:
        """Raises Unfit where the plan's logits differ from the module's."""
        plan, count = choice.plan, len(self._tokens)
        if paged:
            tables = np.arange(1, pages_of(count) + 1)[None]
            cache: Any = PagedCache(plan.shapes, tables.size + 1, self._expected.dtype, self._device)
            layout = lay_out(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count]), tables)
            tokens, positions, places, bounds, columns = (
                torch.from_numpy(array).to(self._device)
                for array in (self._tokens, layout.positions, layout.places, layout.bounds, tables)
            )
            batch = AttentionBatch(bounds.int(), bounds[1:].int(), columns.int(), count)
            rows: Any = PagedTokens(tokens, positions, places, batch)
        else:
            cache = KVCache(plan.shapes, 1, count)
            rows = pack([Segment(0, 0, 0, count)], self._tokens, choice.counts, cache, self._device)
        rows.media = self._sight.rows([(self._media, 0, count)], len(rows))
        _compare(list(plan.forward(rows, cache)[:count]), list(self._expected))


def _compare(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Of each length one sequence must have the module's logits.

    Raises:
        Unfit: none of a length has.
    """
    excess = []
    for row, reference in zip(logits, expected, strict=True):
        worst = float((row.float() - reference.float()).abs().max())
        bound = TOLERANCE[row.dtype] * max(1e-3, float(reference.abs().max()))
        excess.append((worst / bound if worst == worst else math.inf, worst, bound))
    for length in range(len(LENGTHS)):
        ratio, worst, bound = min(excess[length :: len(LENGTHS)])
        if ratio > 1:
            raise Unfit(f"packed logits differ from the model's own by {worst:.3g}, more than {bound:.3g}")


class _Trial:
    """A small cache and the two kinds of passes."""

    def __init__(self, plan: Any, counts: RowCounts, longest: int) -> None:
        self._plan, self.counts = plan, counts
        self._rows = counts.pad(len(LENGTHS) * DRAWS)
        self._cache = KVCache(plan.shapes, self._rows, longest)

    def together(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Both sequences in one prefill and one decode step."""
        self._prefill(dict(enumerate(sequences)))
        out = self._decode(dict(enumerate(sequences)))
        return [out[slot] for slot in range(len(sequences))]

    def independent(self, sequences: list[torch.Tensor], together: list[torch.Tensor]) -> bool:
        """Whether each alone, in the last slot, gives the same bits."""
        for tokens, expected in zip(sequences, together, strict=True):
            slot = self._rows - 1
            self._prefill({slot: tokens})
            if not torch.equal(self._decode({slot: tokens})[slot], expected):
                return False
        return True

    def _prefill(self, by_slot: dict[int, torch.Tensor]) -> None:
        segments, used = [], 0
        for slot, tokens in by_slot.items():
            segments.append(Segment(slot, 0, used, used + len(tokens) - 1))
            used += len(tokens) - 1
        flat = torch.cat([tokens[:-1] for tokens in by_slot.values()]).cpu().numpy()
        rows = pack(segments, flat, self.counts, self._cache, "cpu")
        self._plan.forward(rows, self._cache, logits=False)

    def _decode(self, by_slot: dict[int, torch.Tensor]) -> torch.Tensor:
        tokens, positions = np.zeros((2, self._rows), dtype=np.int64)
        active = np.zeros(self._rows, dtype=bool)
        for slot, ids in by_slot.items():
            tokens[slot], positions[slot], active[slot] = int(ids[-1]), len(ids) - 1, True
        rows = decode_rows(tokens, positions, active, self._cache, "cpu")
        return self._plan.forward(rows, self._cache, logits=True)  # type: ignore[no-any-return]
