"""How old a group may be when it trains: which groups a free step takes, when it waits, and what has grown too old.

A group that version ``u`` began (the lowest version among its trainable tokens) may train in the steps up to version
``u + max_staleness``. Pure functions of numbers; the collector acts on the answers.

**wait** takes a step's groups only if all others that are open can still train in time: after the take at version v,
the open groups that began at u or before must fit into the steps v + 1 ... u + max_staleness, a batch each, for every
u (earliest deadline first; Jackson 1955). At most ``(max_staleness + 1) * batch`` groups are open and each begins with
the version in training, so taking the oldest always fits: waiting ends when those end, and nothing is dropped.

**restart, drop**: a step takes the oldest groups that are finished. What is then left and could not train at the next
version is begun again, or dropped. **mask**: it goes on, and its tokens that are too old leave the loss when it is
taken; only a group without any token young enough is dropped.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from slime_core.report.staleness import stale_metrics, staleness_metrics, trained_versions
from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.rollout.surplus import Flight
    from slime_core.types import Completion

STALE, RESTARTED = "stale", "restarted"
"""Reasons of samples that were dropped because of their age: for good, or because their group began again."""

Policy = Literal["wait", "restart", "mask", "drop"]


class Bound:
    """The bound of one stage. Groups are known by position, their age by the version that began them.

    Example: max_staleness 2, batch 2, version 2 in training; positions 0-3 began at version 0, 8 and 9 at version 2
        bound.ready({8: 2, 9: 2}, {0: 0, 1: 0, 2: 0, 3: 0}, 2)                   # None: two of the old ones go first
        bound.ready({8: 2, 9: 2, 0: 0, 1: 0}, {2: 2, 3: 2}, 2)                   # [0, 1]
    """

    def __init__(self, most: int, batch: int, policy: Policy = "wait") -> None:
        self.most, self.batch, self.policy = most, batch, policy

    @classmethod
    def of(cls, config: Config) -> Bound:
        """The bound that a stage's config asks for."""
        rollout = config.rollout
        return cls(rollout.max_staleness, rollout.rollout_batch_size, rollout.stale_policy)

    def oldest(self, version: int) -> int:
        """The oldest weights whose tokens may train at ``version``."""
        return version - self.most

    def ready(self, kept: Mapping[int, int], flying: Mapping[int, int], version: int) -> list[int] | None:
        """The positions of a step's groups, None where it must wait for more of them.

        Args:
            kept: finished groups, position to the version that began them, in the order in which they finished.
            flying: unfinished ones, likewise.
            version: of the weights in training.
        """
        ranked = sorted(kept, key=lambda position: kept[position])  # ties stay in the order of finishing
        taken, left = ranked[: self.batch], ranked[self.batch :]
        if len(taken) < self.batch:
            return None
        if self.policy != "wait" or self.fits([*(kept[p] for p in left), *flying.values()], version):
            return taken
        # Where no choice is in time (a resumed run with other settings), waiting must still end.
        youngest = kept[taken[-1]]
        return taken if all(began >= youngest for began in flying.values()) else None

    def fits(self, began: Iterable[int], version: int) -> bool:
        """Whether groups that are open after the take at ``version`` can all train in time."""
        return all(n // self.batch < u + self.most - version for n, u in enumerate(sorted(began)))

    def overdue(self, groups: Mapping[int, int], version: int) -> list[int]:
        """Positions of those that are too old to train at ``version``, in order.

        ``groups`` are position to the version that began each; under mask, to the newest that made a token.
        """
        return sorted(position for position, u in groups.items() if u < self.oldest(version))


def began(group: Group, default: int) -> int:
    """The lowest version among a group's trainable tokens, or ``default`` where no model made one."""
    return min((v for sample in group.samples for v in trained_versions(sample)), default=default)


def newest(group: Group, default: int) -> int:
    """The highest version among a group's trainable tokens, or ``default`` where no model made one."""
    return max((v for sample in group.samples for v in trained_versions(sample)), default=default)


def mask_stale(samples: Sequence[Sample], oldest: int) -> list[Sample]:
    """Take the tokens that weights before ``oldest`` made out of the loss; the answer is the samples that lost some.

    Tokens that no model made keep their mask. The outcome is a function of the stored sample and ``oldest``, so a step
    that is replayed from the ledger masks the same tokens.
    """
    changed = []
    for sample in samples:
        if all(v >= oldest for v in trained_versions(sample)):
            continue
        before = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        mask = zip(before, sample.weight_versions, strict=True)
        sample.loss_mask = [0 if 0 <= version < oldest else on for on, version in mask]
        changed.append(sample)
    return changed


def mask_older(samples: Sequence[Sample]) -> None:
    """Take a sample's tokens out of the loss that older weights made than those that finished it."""
    for sample in samples:
        mask_stale([sample], max(sample.weight_versions, default=-1))


class Ageing:
    """One stage's groups, by position. ``restarts`` says what becomes of those that are too old.

    Example:
        age = Ageing(config)
        age.kept(7, group, version=3)                       # it is finished
        positions = age.ready({7: group}, flying, 4)        # None: wait
        age.took([group], 4)
        metrics = age.pop_metrics()
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self.bound = Bound.of(config)
        self.restarts = rollout.stale_policy == "restart"
        self._ahead = rollout.max_staleness > 0
        self._free = self._ahead and rollout.async_schedule == "free"
        self._began: dict[int, int] = {}  # finished groups: position -> the version that began them
        self._newest: dict[int, int] = {}  # and the last that made a token
        self._given_up: dict[str, list[int]] = defaultdict(list)  # kind -> response lengths
        self._trained: list[int] = []  # response lengths
        self._metrics: dict[str, float] = {}
        self._idle_since: float | None = None
        self._idle = self._waited = 0.0

    def kept(self, position: int, group: Group, version: int) -> None:
        """A group is finished; ``version`` stands where no model made a token."""
        self._began[position], self._newest[position] = began(group, version), newest(group, version)

    def ready(self, kept: Iterable[int], flying: Mapping[int, Flight], version: int) -> list[int] | None:
        """The positions of a free step's groups, None where it must wait."""
        finished = {position: self._began[position] for position in kept}
        return self.bound.ready(finished, {p: flight.version for p, flight in flying.items()}, version)

    def overdue(self, kept: Iterable[int], flying: Mapping[int, Flight], version: int) -> list[int]:
        """Positions of what can no longer train at ``version`` or later; those that are being given up left out."""
        if not self._free:
            return []
        if self.bound.policy == "mask":
            return self.bound.overdue({position: self._newest[position] for position in kept}, version)
        ages = {position: self._began[position] for position in kept}
        ages |= {position: flight.version for position, flight in flying.items() if not flight.stale}
        return self.bound.overdue(ages, version)

    def give_up(self, flight: Flight, parts: Sequence[Completion]) -> None:
        """Count a group that is begun again or dropped; ``parts`` is what its aborted requests had."""
        made = {part.id: len(part.tokens) for part in parts}
        kind = "restarted" if self.restarts else "dropped"
        self._given_up[kind] += [sample.response_length + made.get(sample.id, 0) for sample in flight.samples]

    def took(self, groups: Sequence[Group], version: int, waited: float = 0.0) -> None:
        """A step of ``version`` took these groups after ``waited`` seconds; their tokens that are too old are masked.

        So they are when the step is made again: the outcome depends on the stored samples and the version alone.
        """
        for group in groups:
            self._began.pop(group.prompt.position, None)
            self._newest.pop(group.prompt.position, None)
        if not self._ahead:
            return
        samples = [sample for group in groups for sample in group.samples]
        if self.bound.policy == "mask":
            self._given_up["masked"] += _lengths(mask_stale(samples, self.bound.oldest(version)))
        self._trained += _lengths(samples)
        self._metrics |= staleness_metrics(groups, version, self.bound.most)
        self._waited += waited

    def watch(self, flying: Iterable[Flight]) -> None:
        """Whether the engine has work: anything in flight that is not finished."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._idle_since = None if any(not flight.generated for flight in flying) else now

    def pop_metrics(self, flying: Iterable[Flight]) -> dict[str, float]:
        """The figures since the last call; nothing in a run that is never ahead."""
        if not self._ahead:
            return {}
        self.watch(flying)
        metrics = self._metrics | stale_metrics(self._given_up, self._trained)
        metrics |= {"async/engine_idle_seconds": self._idle, "async/trainer_wait_seconds": self._waited}
        self._metrics, self._given_up, self._trained = {}, defaultdict(list), []
        self._idle = self._waited = 0.0
        return metrics


def _lengths(samples: Iterable[Sample]) -> list[int]:
    return [sample.response_length for sample in samples]
