"""Machines whose GPUs reach each other by NVLink, and which of them a run's bundles should share.

A rack such as NVL72 is one domain of many machines. Ray packs bundles onto few machines but knows nothing of racks, so
the domain is chosen here, and each bundle is placed in it. A machine's label names its domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slime_ray.placement import lacking

if TYPE_CHECKING:
    from slime_ray.placement import Resources

LABELS = ("ray.io/gpu-domain", "nvidia.com/gpu.clique")
"""Ray's label, set by itself if the GPUs report it; and that of NVIDIA's GPU operator, for `ray start --labels`."""

Labels = Mapping[str, str]


def selectors(
    bundles: Sequence[Resources], ranks: int, machines: Mapping[str, Resources], labels: Mapping[str, Labels]
) -> list[dict[str, str]]:
    """A selector of labels for each bundle; empty where no machine names a domain, one machine has room, or no domain.

    All bundles share the smallest domain that has room for all of them; where none has, the first ``ranks``, those of
    the trainer, share one, and engines live where there is room.

    Args:
        bundles: of the run, the trainer's first.
        ranks: how many are the trainer's.
        machines: what each has free, by name.
        labels: of each, by name.

    Example: selectors([{"GPU": 4}] * 2, 1, {"a": {"GPU": 4}, "b": {"GPU": 4}}, {"a": here, "b": here}) == [here, here]
    """
    if any(not lacking(bundles, {name: resources}) for name, resources in machines.items()):
        return []
    key = next((key for key in LABELS if any(key in machine_labels for machine_labels in labels.values())), "")
    for part in (len(bundles), ranks):
        if key and part and (domain := _smallest(bundles[:part], key, machines, labels)):
            return [{key: domain}] * part + [{}] * (len(bundles) - part)
    return []


def _smallest(
    bundles: Sequence[Resources], key: str, machines: Mapping[str, Resources], labels: Mapping[str, Labels]
) -> str:
    """The domain of fewest GPUs, of equals the first by name, that holds all bundles."""
    domains: dict[str, dict[str, Resources]] = {}
    for name, resources in machines.items():
        if domain := labels.get(name, {}).get(key, ""):
            domains.setdefault(domain, {})[name] = resources
    by_size = sorted(domains, key=lambda domain: (sum(r.get("GPU", 0) for r in domains[domain].values()), domain))
    return next((domain for domain in by_size if not lacking(bundles, domains[domain])), "")
