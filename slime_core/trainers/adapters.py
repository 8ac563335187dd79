"""Several adapters in one run: each learns from its own samples alone, as in a run of its own.

    Batch --members--> a Batch an adapter --score, advantage, step, verify--> columns and metrics of all

An adapter's samples are those whose `Sample.model` names it. Everything that is taken over a step's samples is taken
over these: baselines and deviations of a group, whitening, optimizer steps and their loss denominators, micro-batches,
gradient norm and clipping. So an adapter's weights are, bit for bit, those of a run with its samples and no others.
An adapter without samples in a step stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.context import unknown_adapter
from slime_core.trainers.data_parallel import rows_of, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.plugins import Plugins
    from slime_core.protocols import Role, Trainer
    from slime_core.types import Batch, Columns

Members = list[tuple[str, "NDArray[np.int64]"]]
SUMS = ("train_tokens", "optimizer_steps", "skipped_steps", "critic_only_steps")
"""Metrics of a step that add up over adapters, with those below ``skipped_steps/``; of others the mean is taken."""


def members(batch: Batch, names: Sequence[str]) -> Members:
    """The adapters that have samples in a batch, in the order of ``names``, and which those are.

    A sample without a model is of the first adapter. One that no adapter made, such as a frozen model's, is left out:
    it has nothing to train.

    Raises:
        EngineError: ENG09 a sample that trains, of another adapter.
    """
    models = np.array([model or names[0] for model in batch.models or [""] * len(batch)])
    for place in np.flatnonzero(~np.isin(models, names)).tolist():
        if batch.loss_mask[batch.response_offsets[place] : batch.response_offsets[place + 1]].any():
            raise unknown_adapter(str(models[place]), names, f"sample {batch.sample_ids[place]}")
    of_name = [(name, np.flatnonzero(models == name)) for name in names]
    return [(name, places) for name, places in of_name if len(places)]


def estimated(batch: Batch, columns: dict[str, Columns], plugins: Plugins, train: Any) -> Batch:
    """`Plugins.advantage` of a batch; with several adapters of each one's samples by themselves."""
    names = train.lora_adapters
    if len(names) < 2:
        return plugins.advantage(batch, columns, train)
    combined: Columns = {}
    for _, places in members(batch, names):
        rows = rows_of(batch.response_offsets, places)
        part = {role: {name: values[rows] for name, values in by_name.items()} for role, by_name in columns.items()}
        put(combined, plugins.advantage(take(batch, places), part, train).columns, rows, len(batch.loss_mask))
    return replace(batch, columns={**batch.columns, **combined})


def put(combined: Columns, columns: Columns, rows: NDArray[np.int64], size: int) -> None:
    """Put the columns of some rows at their places among ``size``; the others are 0."""
    for name, values in columns.items():
        combined.setdefault(name, np.zeros((size, *values.shape[1:]), values.dtype))[rows] = values


class AdapterTrainer:
    """A `protocols.Trainer` of several adapters: the trainer within gets batches of one adapter's samples."""

    def __init__(self, trainer: Trainer, names: Sequence[str]) -> None:
        self._trainer, self._names = trainer, tuple(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`; a sample that no adapter made has zeros."""
        combined: dict[str, Columns] = {}
        for _, places in members(batch, self._names):
            rows = rows_of(batch.response_offsets, places)
            for role, columns in (await self._trainer.score(take(batch, places), roles)).items():
                put(combined.setdefault(role, {}), columns, rows, len(batch.loss_mask))
        return combined

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`: the metrics of each adapter as ``ADAPTER/METRIC``, and those of all together."""
        of_adapters = {
            name: await self._trainer.step(take(batch, places)) for name, places in members(batch, self._names)
        }
        named = {f"{name}/{key}": value for name, metrics in of_adapters.items() for key, value in metrics.items()}
        return together(list(of_adapters.values())) | named

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`; errors are those of the worst adapter."""
        errors: dict[str, float] = {}
        for name, places in members(batch, self._names):
            for key, value in (await self._trainer.verify(take(batch, places))).items():
                kind, _, parameter = key.partition("/")
                key = f"{kind}/{name}/{parameter}" if parameter else key
                worse = min if key == "float64" else max
                errors[key] = worse(errors.get(key, value), value)
        return errors


def together(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """A step's metrics over adapters: counts are sums, all else is the mean of the adapters that have it."""
    figures: dict[str, float] = {}
    for key in dict.fromkeys(key for one in metrics for key in one):
        values = [one[key] for one in metrics if key in one]
        figures[key] = sum(values) / (1 if key.partition("/")[0] in SUMS else len(values))
    return figures
