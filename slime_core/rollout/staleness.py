"""Staleness of groups: which ones a free step takes, when it waits, what is too stale to train, and the metrics.

A group that version ``u`` began (the lowest version among its trainable tokens) may train in the steps up to version
``u + max_staleness``. Pure functions of numbers; the collector acts on the results.

**wait** takes a step's groups only if all other open groups can still train in time: after the step of version v,
those that began at u or before must fit into the steps v + 1 ... u + max_staleness, a batch each, for every u
(earliest deadline first; Jackson 1955). At most ``(max_staleness + 1) * batch`` groups are open and each begins with
the version in training, so taking the stalest always fits: waiting ends when those end, and nothing is dropped.

**restart, drop**: a step takes the stalest finished groups. What is left and could not train at the next version is
begun again, or dropped. **mask**: it goes on, and its stale tokens leave the loss when a step takes it; only a group
without any token within the bound is dropped.

Dropping stale groups removes long responses first and inflates the reward, so metrics are split by response length.
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
    from slime_core.rollout.groups import OpenGroup, OpenGroups
    from slime_core.types import Completion

STALE, RESTARTED = "stale", "restarted"  # reasons of dropped samples: for good, or their group begins again
FIRST_BUCKET = 64  # tokens; every further one is twice as long
KINDS = ("dropped", "restarted", "masked")  # what becomes of stale samples

Policy = Literal["wait", "restart", "mask", "drop"]


class Bound:
    """The bound of one stage, in numbers: groups by position, with the version that began each.

    Example: max_staleness 2, batch 2, version 2 in training; positions 0-3 began at version 0, 8 and 9 at version 2
        bound.ready({8: 2, 9: 2}, {0: 0, 1: 0, 2: 0, 3: 0}, 2)                   # None: two of version 0 go first
        bound.ready({8: 2, 9: 2, 0: 0, 1: 0}, {2: 2, 3: 2}, 2)                   # [0, 1]
    """

    def __init__(self, most: int, batch: int, policy: Policy = "wait") -> None:
        self.most, self.batch, self.policy = most, batch, policy

    def oldest(self, version: int) -> int:
        """The lowest version whose tokens may train at ``version``."""
        return version - self.most

    def ready(self, finished: Mapping[int, int], in_flight: Mapping[int, int], version: int) -> list[int] | None:
        """The positions of a step's groups, None where it must wait for more of them.

        Args:
            finished: position to the version that began the group, in the order in which groups finished.
            in_flight: of unfinished groups, likewise.
            version: of the weights in training.
        """
        ranked = sorted(finished, key=lambda position: finished[position])  # ties stay in the order of finishing
        stalest, newer = ranked[: self.batch], ranked[self.batch :]
        if len(stalest) < self.batch:
            return None
        if self.policy != "wait" or self.fits([*(finished[p] for p in newer), *in_flight.values()], version):
            return stalest
        # Where no choice is in time (a resumed run with other settings), waiting must still end.
        latest = finished[stalest[-1]]
        return stalest if all(began >= latest for began in in_flight.values()) else None

    def fits(self, began: Iterable[int], version: int) -> bool:
        """Whether groups that are open after the step of ``version`` can all train in time."""
        return all(n // self.batch < u + self.most - version for n, u in enumerate(sorted(began)))

    def overdue(self, groups: Mapping[int, int], version: int) -> list[int]:
        """Positions of those that are too stale to train at ``version``, in order.

        ``groups`` are position to the version that began each; under mask, to the newest that made a token.
        """
        return sorted(position for position, u in groups.items() if u < self.oldest(version))


def version_span(group: Group, default: int) -> tuple[int, int]:
    """The lowest and the highest version among a group's trainable tokens; ``default`` where there is none."""
    versions = [v for sample in group.samples for v in trained_versions(sample)]
    return min(versions, default=default), max(versions, default=default)


def mask_stale(samples: Sequence[Sample], oldest: int) -> list[Sample]:
    """Take tokens of versions before ``oldest`` out of the loss; returns the samples that lost some.

    Tokens of no version keep their mask. The outcome is a function of the stored sample and ``oldest``, so a step that
    is replayed from the ledger masks the same tokens.
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


class Staleness:
    """The staleness of a stage's groups. ``restarts``: stale ones begin again, and are not dropped."""

    def __init__(self, config: Config, groups: OpenGroups) -> None:
        rollout = config.rollout
        self.bound = Bound(rollout.max_staleness, rollout.rollout_batch_size, rollout.stale_policy)
        self.restarts = rollout.stale_policy == "restart"
        self._groups = groups
        self._ahead = rollout.max_staleness > 0
        self._free = self._ahead and rollout.async_schedule == "free"
        self._stale: dict[str, list[int]] = defaultdict(list)  # kind -> response lengths
        self._trained: list[int] = []  # response lengths
        self._metrics: dict[str, float] = {}
        self._idle_since: float | None = None
        self._idle = self._waited = 0.0

    def ready(self, version: int) -> list[int] | None:
        """The positions of a free step's groups, None where it must wait."""
        finished, in_flight = _versions(self._groups.finished), _versions(self._groups.in_flight)
        return self.bound.ready(finished, in_flight, version)

    def overdue(self, version: int) -> list[int]:
        """Positions of what can no longer train at ``version`` or later, without what is being stopped already."""
        finished, in_flight = self._groups.finished, self._groups.in_flight
        if not self._free:
            return []
        if self.bound.policy == "mask":
            return self.bound.overdue({position: group.newest for position, group in finished.items()}, version)
        running = {position: group for position, group in in_flight.items() if not group.stale}
        return self.bound.overdue(_versions(finished) | _versions(running), version)

    def give_up(self, group: OpenGroup, completions: Sequence[Completion]) -> None:
        """Count a group that is begun again or dropped; ``completions`` are those of its aborted requests."""
        lengths = {completion.id: len(completion.tokens) for completion in completions}
        kind = "restarted" if self.restarts else "dropped"
        self._stale[kind] += [sample.response_length + lengths.get(sample.id, 0) for sample in group.samples]

    def step(self, groups: Sequence[Group], version: int, waited: float = 0.0) -> None:
        """Count the groups of a step of ``version`` that waited so many seconds for them, and mask their stale tokens.

        A step that is made again masks the same: the outcome depends on the stored samples and the version alone.
        """
        if not self._ahead:
            return
        samples = [sample for group in groups for sample in group.samples]
        if self.bound.policy == "mask":
            masked = mask_stale(samples, self.bound.oldest(version))
            self._stale["masked"] += [sample.response_length for sample in masked]
        self._trained += [sample.response_length for sample in samples]
        self._metrics |= staleness_metrics(groups, version, self.bound.most)
        self._waited += waited

    def watch(self) -> None:
        """Measure how long the engine is idle: until something in flight is not generated."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._idle_since = None if any(not group.generated for group in self._groups.in_flight.values()) else now

    def pop_metrics(self) -> dict[str, float]:
        """The metrics since the last call; none in a run that is never ahead."""
        if not self._ahead:
            return {}
        self.watch()
        metrics = self._metrics | stale_metrics(self._stale, self._trained)
        metrics |= {"async/engine_idle_seconds": self._idle, "async/trainer_wait_seconds": self._waited}
        self._metrics, self._stale, self._trained = {}, defaultdict(list), []
        self._idle = self._waited = 0.0
        return metrics


def _versions(groups: Mapping[int, OpenGroup]) -> dict[int, int]:
    return {position: group.version for position, group in groups.items()}


def trained_versions(sample: Sample) -> set[int]:
    """The versions that made a sample's trainable tokens."""
    return set(trained_tokens(sample))


def trained_tokens(sample: Sample) -> dict[int, int]:
    """How many of a sample's trainable tokens each version made."""
    versions, mask = sample.weight_versions, sample.loss_mask
    if sample.remove_sample or not versions:
        return {}
    if len(distinct := set(versions)) == 1:  # the common case, in a tenth of the time
        counts = {distinct.pop(): len(versions) if mask is None else len(mask) - mask.count(0)}
    else:
        counts = dict(Counter(versions if mask is None else compress(versions, mask)))
    return {version: count for version, count in counts.items() if version >= 0 and count}


def staleness_metrics(groups: Sequence[Group], version: int, most: int) -> dict[str, float]:
    """``staleness/mean min max`` of groups, and their and their tokens' shares ``staleness/N`` ``staleness/tokens/N``.

    A group's staleness is ``version`` minus the lowest version among its trainable tokens, 0 where there is none.
    ``most`` is the bound: there is a share for each staleness up to it, and for higher ones that occur.
    """
    if not groups:
        return {}
    values, tokens = [], Counter[int]()
    for group in groups:
        counts = [trained_tokens(sample) for sample in group.samples]
        values.append(version - min(chain.from_iterable(counts), default=version))
        for of_sample in counts:
            tokens.update({version - v: count for v, count in of_sample.items()})
    metrics = {
        "staleness/mean": sum(values) / len(values),
        "staleness/min": float(min(values)),
        "staleness/max": float(max(values)),
    }
    highest = max([most, *values, *tokens])
    for name, counter in ("staleness", Counter(values)), ("staleness/tokens", tokens):
        metrics |= {f"{name}/{value}": counter[value] / max(counter.total(), 1) for value in range(highest + 1)}
    return metrics


def stale_metrics(stale: Mapping[str, Sequence[int]], trained: Sequence[int]) -> dict[str, float]:
    """Stale samples by kind and by response length; nothing where there are none.

    ``stale/KIND`` counts them and ``stale/KIND_rate`` is their share; ``stale/KIND/len_A_B`` and
    ``stale/KIND_rate/len_A_B`` likewise of those with at least A and fewer than B tokens when they were stopped. A
    share is of those stopped and those that ``trained``; masked ones are among these.

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
