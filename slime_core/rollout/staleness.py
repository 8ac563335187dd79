"""Staleness of groups: which ones a free step takes, when it waits, what is too stale to train, and the figures of it.

A group that version ``u`` began (the lowest version among its trainable tokens) may train in the steps up to version
``u + max_staleness``. Pure functions of numbers; the collector acts on the answers.

**wait** takes a step's groups only if all others that are open can still train in time: after the take at version v,
the open groups that began at u or before must fit into the steps v + 1 ... u + max_staleness, a batch each, for every
u (earliest deadline first; Jackson 1955). At most ``(max_staleness + 1) * batch`` groups are open and each begins with
the version in training, so taking the oldest always fits: waiting ends when those end, and nothing is dropped.

**restart, drop**: a step takes the oldest groups that are finished. What is then left and could not train at the next
version is begun again, or dropped. **mask**: it goes on, and its tokens that are too old leave the loss when it is
taken; only a group without any token young enough is dropped.

A run that drops stale groups drops long responses first, so the figures are told by response length: a reward curve
that rises because long answers are gone should be seen to.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Literal

from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.rollout.groups import InFlight
    from slime_core.types import Completion

STALE, RESTARTED = "stale", "restarted"
"""Reasons of samples that were dropped because of their age: for good, or because their group began again."""

FIRST_BUCKET = 64  # tokens; every further one is twice as long
KINDS = ("dropped", "restarted", "masked")
"""What may become of samples that are too old: for each kind their lengths are counted."""

Policy = Literal["wait", "restart", "mask", "drop"]


class Bound:
    """The bound of one stage. Groups are known by position, their age by the version that began them.

    Example: max_staleness 2, batch 2, version 2 in training; positions 0-3 began at version 0, 8 and 9 at version 2
        bound.ready({8: 2, 9: 2}, {0: 0, 1: 0, 2: 0, 3: 0}, 2)                   # None: two of the old ones go first
        bound.ready({8: 2, 9: 2, 0: 0, 1: 0}, {2: 2, 3: 2}, 2)                   # [0, 1]
    """

    def __init__(self, most: int, batch: int, policy: Policy = "wait") -> None:
        self.most, self.batch, self.policy = most, batch, policy

    def oldest(self, version: int) -> int:
        """The oldest weights whose tokens may train at ``version``."""
        return version - self.most

    def ready(self, ready: Mapping[int, int], in_flight: Mapping[int, int], version: int) -> list[int] | None:
        """The positions of a step's groups, None where it must wait for more of them.

        Args:
            kept: finished groups, position to the version that began them, in the order in which they finished.
            in_flight: unfinished ones, likewise.
            version: of the weights in training.
        """
        ranked = sorted(ready, key=lambda position: ready[position])  # ties stay in the order of finishing
        oldest, newer = ranked[: self.batch], ranked[self.batch :]
        if len(oldest) < self.batch:
            return None
        if self.policy != "wait" or self.fits([*(ready[p] for p in newer), *in_flight.values()], version):
            return oldest
        # Where no choice is in time (a resumed run with other settings), waiting must still end.
        youngest = ready[oldest[-1]]
        return oldest if all(began >= youngest for began in in_flight.values()) else None

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


class Staleness:
    """One stage's groups, by position. ``restarts`` says what becomes of those that are too old.

    Example:
        staleness = Staleness(config)
        staleness.kept(7, group, version=3)                       # it is finished
        positions = staleness.ready({7: group}, in_flight, 4)        # None: wait
        staleness.took([group], 4)
        metrics = staleness.pop_metrics(())
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self.bound = Bound(rollout.max_staleness, rollout.rollout_batch_size, rollout.stale_policy)
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

    def ready(self, ready: Iterable[int], in_flight: Mapping[int, InFlight], version: int) -> list[int] | None:
        """The positions of a free step's groups, None where it must wait."""
        finished = {position: self._began[position] for position in ready}
        return self.bound.ready(finished, {p: flight.version for p, flight in in_flight.items()}, version)

    def overdue(self, ready: Iterable[int], in_flight: Mapping[int, InFlight], version: int) -> list[int]:
        """Positions of what can no longer train at ``version`` or later; those that are being given up left out."""
        if not self._free:
            return []
        if self.bound.policy == "mask":
            return self.bound.overdue({position: self._newest[position] for position in ready}, version)
        ages = {position: self._began[position] for position in ready}
        ages |= {position: flight.version for position, flight in in_flight.items() if not flight.stale}
        return self.bound.overdue(ages, version)

    def give_up(self, flight: InFlight, parts: Sequence[Completion]) -> None:
        """Count a group that is begun again or dropped; ``parts`` is what its aborted requests had."""
        lengths = {part.id: len(part.tokens) for part in parts}
        kind = "restarted" if self.restarts else "dropped"
        self._given_up[kind] += [sample.response_length + lengths.get(sample.id, 0) for sample in flight.samples]

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

    def watch(self, in_flight: Iterable[InFlight]) -> None:
        """Whether the engine has work: anything in flight that is not finished."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._idle_since = None if any(not flight.generated for flight in in_flight) else now

    def pop_metrics(self, in_flight: Iterable[InFlight]) -> dict[str, float]:
        """The figures since the last call; nothing in a run that is never ahead."""
        if not self._ahead:
            return {}
        self.watch(in_flight)
        metrics = self._metrics | stale_metrics(self._given_up, self._trained)
        metrics |= {"async/engine_idle_seconds": self._idle, "async/trainer_wait_seconds": self._waited}
        self._metrics, self._given_up, self._trained = {}, defaultdict(list), []
        self._idle = self._waited = 0.0
        return metrics


def _lengths(samples: Iterable[Sample]) -> list[int]:
    return [sample.response_length for sample in samples]


def trained_versions(sample: Sample) -> set[int]:
    """The versions that made a sample's trainable tokens."""
    return set(trained_tokens(sample))


def trained_tokens(sample: Sample) -> dict[int, int]:
    """How many of a sample's trainable tokens each version made."""
    versions, mask = sample.weight_versions, sample.loss_mask
    if sample.remove_sample or not versions:
        return {}
    if len(only := set(versions)) == 1:  # as it is but for updates in flight: a tenth of the time
        counts = {only.pop(): len(versions) if mask is None else len(mask) - mask.count(0)}
    else:
        counts = dict(Counter(versions if mask is None else compress(versions, mask)))
    return {version: count for version, count in counts.items() if version >= 0 and count}


def staleness_metrics(groups: Sequence[Group], version: int, most: int) -> dict[str, float]:
    """``staleness/mean min max`` of groups, ``staleness/N`` and ``staleness/tokens/N``: shares by age N.

    The age of a group is ``version`` minus the lowest version among its trainable tokens, 0 where no model made one.
    ``most`` is the bound: there is a share for each age up to it, and for older ones where there are any.
    """
    if not groups:
        return {}
    ages, tokens = [], Counter[int]()
    for group in groups:
        counts = [trained_tokens(sample) for sample in group.samples]
        ages.append(version - min(chain.from_iterable(counts), default=version))
        for of_sample in counts:
            tokens.update({version - v: count for v, count in of_sample.items()})
    metrics = {
        "staleness/mean": sum(ages) / len(ages),
        "staleness/min": float(min(ages)),
        "staleness/max": float(max(ages)),
    }
    highest = max([most, *ages, *tokens])
    metrics |= {f"staleness/{age}": share for age, share in _shares(Counter(ages), highest)}
    return metrics | {f"staleness/tokens/{age}": share for age, share in _shares(tokens, highest)}


def stale_metrics(stale: Mapping[str, Sequence[int]], trained: Sequence[int]) -> dict[str, float]:
    """Samples that were too old, by kind and by response length; nothing where there are none.

    ``stale/KIND`` counts them and ``stale/KIND_rate`` is their share; ``stale/KIND/len_A_B`` and
    ``stale/KIND_rate/len_A_B`` likewise of those with at least A and fewer than B tokens when they were given up. A
    share is of those given up and those that ``trained``; masked ones are among these.

    Args:
        stale: response lengths of the samples, by kind (`KINDS`).
        trained: response lengths of the samples that trained in the step.
    """
    metrics: dict[str, float] = {}
    of = Counter(map(bucket, trained))
    for kind in KINDS:
        lengths = stale.get(kind, ())
        if not lengths:
            continue
        extra = 0 if kind == "masked" else 1
        metrics[f"stale/{kind}"] = float(len(lengths))
        metrics[f"stale/{kind}_rate"] = len(lengths) / (len(trained) + extra * len(lengths))
        for name, count in sorted(Counter(map(bucket, lengths)).items()):
            metrics[f"stale/{kind}/{name}"] = float(count)
            metrics[f"stale/{kind}_rate/{name}"] = count / (of[name] + extra * count)
    return metrics


def bucket(length: int) -> str:
    """``len_0_64``, ``len_64_128``, ``len_128_256``, ... for a response of ``length`` tokens."""
    low, high = 0, FIRST_BUCKET
    while length >= high:
        low, high = high, 2 * high
    return f"len_{low}_{high}"


def _shares(ages: Counter[int], highest: int) -> Iterable[tuple[int, float]]:
    total = max(ages.total(), 1)
    return [(age, ages[age] / total) for age in range(highest + 1)]
