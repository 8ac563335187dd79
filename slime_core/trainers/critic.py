"""What the critics of all backends share: where one starts from, its schedule, its loss, and its figures.

score -> ``values`` [R] -> estimator -> ``returns`` [R] -> value loss at the policy's token weights -> optimizer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.errors import TrainerError
from slime_core.trainers import checks
from slime_core.trainers.schedule import Schedule
from slime_core.trainers.share import Sums, on
from slime_core.weights.shards import Shards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import Batch, Columns, MicroBatch
    from slime_core.weights.folder import ModelFolder

KEY = "train.critic_load"
READS = ("values", "returns")  # columns of the value loss
HEADS = ("score", "value_head", "v_head")  # names of a stored head, the first that is there


def open_critic(path: str, policy: ModelFolder) -> tuple[ModelFolder, Shards | None, str]:
    """The folder of ``train.critic_load``, its tensors, the name of its head; the policy's where ``path`` is empty.

    The tensors are None, and the head is empty, where the folder is a causal language model: it has been checked.

    Raises:
        TrainerError: TRN104 another vocabulary.
    """
    if not path:
        return policy, None, ""
    folder = checks.open_model(KEY, path, policy, weights=False)
    stored = Shards.open(folder.path)
    head = next((name for name in HEADS if f"{name}.weight" in stored.infos), "")
    return (folder, stored, head) if head else (checks.open_model(KEY, path, policy), None, "")


def schedule(train: Any, optimizer_steps: int) -> Schedule:
    """Warms up to ``critic_lr`` and decays as the policy's rate does."""
    return Schedule(
        peak=train.critic_lr,
        low=min(train.min_lr, train.critic_lr),
        style=train.lr_decay_style,
        warmup=train.critic_lr_warmup_iters,
        decay=train.lr_decay_iters or optimizer_steps,
    )


def checked(batch: Batch, values: NDArray[np.float32]) -> Columns:
    """The column of values.

    Raises:
        TrainerError: TRN95 a value that is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        sample = checks.sample_at(batch, int(bad[0]))
        raise TrainerError(
            f"a value of sample {sample} is {values[bad[0]]}",
            code="TRN95",
            where=f"sample {sample}",
            why="the critic's weights are not finite",
            fix="lower train.critic_lr",
        )
    return {"values": values}


def check(batch: Batch) -> None:
    """Refuse a batch that the value loss cannot read.

    Raises:
        TrainerError: a column is missing.
    """
    if missing := [name for name in READS if name not in batch.columns]:
        raise TrainerError(
            f"the batch has no column {missing[0]}, which the critic learns from",
            why=f"it has {sorted(batch.columns)}; an estimator that reads values gives returns",
        )


def share(values: torch.Tensor, micro: MicroBatch, clip: float, sums: Sums | None) -> torch.Tensor:
    """A micro-batch's share of the value loss; ``sums`` get it, and per-token metrics by weight.

    Args:
        values: [R], what the critic says now
        clip: ``train.value_clip``
        sums: None where another rank counts
    """
    from slime_core.algo.losses import value_loss

    weight = on(micro.weight, values.device)
    old, returns = (on(micro.columns[name], values.device) for name in READS)
    losses, metrics = value_loss(values, old, returns, clip, weight)
    counts = weight > 0
    total = torch.where(counts, losses * weight, 0).sum()
    if sums is not None:
        if not torch.isfinite(total.detach()):
            sums.blame(losses.detach(), counts, micro.response, micro.samples)
        seen = {name: torch.where(counts, v.detach() * weight, 0).sum() for name, v in metrics.items()}
        sums.add({"loss": total.detach(), **seen})
    return total


def figures(totals: dict[str, float], weight: float, norm: float) -> dict[str, float]:
    """Metrics of the critic's optimizer step, from its sums."""
    named = {"value_loss" if n == "loss" else n: v if n == "loss" else v / weight for n, v in totals.items()}
    return {"critic_grad_norm": norm} | named


def explained_variance(batch: Batch) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over the step's trainable tokens, before the step, in float64.

    1 is a perfect critic, 0 one that knows the mean, below 0 worse. Left out where returns do not vary, and of batches
    without these columns.
    """
    trained = batch.loss_mask > 0
    if not trained.any() or not set(READS) <= batch.columns.keys():
        return {}
    values, returns = (np.asarray(batch.columns[name], dtype=np.float64)[trained] for name in READS)
    spread = float(np.mean((returns - returns.mean()) ** 2))
    if spread == 0 or not np.isfinite(spread):
        return {}
    error = returns - values
    return {"explained_variance": 1.0 - float(np.mean((error - error.mean()) ** 2)) / spread}
