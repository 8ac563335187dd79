"""Partial rollout: what a step with over-sampling left unfinished is continued in the next, with the new weights.

    step v      main/7-0  [tokens of v ......]    `SuspendableEngine.close` stops it, `Ledger.suspend` keeps its turns
    step v + 1  main/7-0  [tokens of v ......][tokens of v + 1 ...]    one response, each token with its version

Switched on by ``rollout.partial_rollout``. Finished groups that the last step did not need are taken first. Nothing is
generated or rewarded twice; after a crash unfinished samples continue from the turns in the ledger. In flight a group
gains ground in every step, so it ends after ``rollout_max_response_len`` ticks in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.rollout.groups import OpenGroup, OpenGroups
from slime_core.rollout.over_sampling import OverSampling
from slime_core.rollout.staleness import mask_stale
from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Ledger
    from slime_core.rollout.suspendable_engine import SuspendableEngine


class PartialRollout(OverSampling):
    """Over-sampling that suspends what a step did not take; the last step of a stage drops it."""

    def __init__(self, config: Config, groups: OpenGroups, engine: SuspendableEngine, ledger: Ledger) -> None:
        super().__init__(config, groups, engine)
        self._ledger = ledger

    async def start(self, groups: Sequence[OpenGroup], version: int) -> None:
        """Start groups; samples that an earlier process suspended go on from the turns that the ledger has."""
        if ids := [name for group in groups if group.record.state != "new" for name in group.ids]:
            self._suspendable.restore(await self._ledger.suspended(ids, version))
        await super().start(groups, version)

    async def end_step(self, *, last: bool) -> bool:
        """Stop what the step did not take, and keep what it has."""
        await self._suspendable.close()
        if not last:
            ids = [name for group in self._groups.in_flight.values() for name in group.ids]
            await self._ledger.suspend(self._suspendable.turns(ids))
        return not last


def mask_older(samples: Sequence[Sample]) -> None:
    """Take a sample's tokens out of the loss that older weights made than those that finished it."""
    for sample in samples:
        mask_stale([sample], max(sample.weight_versions, default=-1))


def version_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Samples made by several weights, and the share of sampled tokens, trained or not, older than ``version``."""
    versions = [[v for v in sample.weight_versions if v >= 0] for group in groups for sample in group.samples]
    tokens = sum(map(len, versions))
    older = sum(v < version for sample_versions in versions for v in sample_versions)
    return {
        "rollout/continued_samples": float(sum(len(set(sample_versions)) > 1 for sample_versions in versions)),
        "rollout/offpolicy_tokens": older / tokens if tokens else 0.0,
    }
