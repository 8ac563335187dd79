"""How old what trains is, and which lengths age costs: groups of a step, and what was given up, in; figures out.

A run that drops what grows too old drops long responses first, so the figures are told by response length: a reward
curve that rises because long answers are gone should be seen to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress

from slime_core.types import Group, Sample

FIRST_BUCKET = 64  # tokens; every further one is twice as long
KINDS = ("dropped", "restarted", "masked")
"""What may become of samples that are too old: for each kind their lengths are counted."""


def trained_versions(sample: Sample) -> set[int]:
    """The versions that made a sample's trainable tokens."""
    return set(trained_tokens(sample))


def trained_tokens(sample: Sample) -> dict[int, int]:
    """How many of a sample's trainable tokens each version made."""
    versions, mask = sample.weight_versions, sample.loss_mask
    if sample.remove_sample or not versions:
        return {}
    if len(only := set(versions)) == 1:  # as it is but for updates in flight: a tenth of the time
        found = {only.pop(): len(versions) if mask is None else len(mask) - mask.count(0)}
    else:
        found = dict(Counter(versions if mask is None else compress(versions, mask)))
    return {version: count for version, count in found.items() if version >= 0 and count}


def staleness_metrics(groups: Sequence[Group], version: int, most: int) -> dict[str, float]:
    """``staleness/mean min max`` of groups, ``staleness/N`` and ``staleness/tokens/N``: shares by age N.

    The age of a group is ``version`` minus the lowest version among its trainable tokens, 0 where no model made one.
    ``most`` is the bound: there is a share for each age up to it, and for older ones where there are any.
    """
    if not groups:
        return {}
    ages, tokens = [], Counter[int]()
    for group in groups:
        made = [trained_tokens(sample) for sample in group.samples]
        ages.append(version - min(chain.from_iterable(made), default=version))
        for of_sample in made:
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
