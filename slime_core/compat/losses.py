"""slime's loss, correction (TIS) and reducer functions as a Loss: scalars over samples, as values a token.

The trainer sums ``weight * value`` over all tokens of an optimizer step. A scalar L of slime's, a loss or a metric,
which it divides by the step's rollouts (or tokens), is spread so that this sum is the same: L / (denominator * weight
* tokens) a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.compat.session import CompatSession
from slime_core.compat.steps import COLUMNS, column_of, rollout_mask_sums
from slime_core.config.presets import settle
from slime_core.errors import PluginError
from slime_core.protocols import Loss, Role
from slime_core.types import Batch

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Function = Callable[..., Any]
SAMPLE, LENGTH, WEIGHT, DENOMINATOR = "slime_sample", "slime_total_length", "slime_weight", "slime_denominator"
MASK, MASK_SUM = "slime_mask", "slime_mask_sum"
EXTRA = (SAMPLE, LENGTH, WEIGHT, DENOMINATOR, MASK, MASK_SUM)
UNCORRECTED = {"use_tis": False, "use_rs": False, "rs_veto_threshold": 0.0}


def extra_columns(batch: Batch, config: Config) -> None:
    """Add a column each for a token's sample, mask and weight, and the sums and denominators of its optimizer step."""
    from slime_core.algorithms.shared.aggregate import token_weights
    from slime_core.trainers.packing import split_rollouts

    train = settle(config.train)
    divisor = train.loss_divisor or config.rollout.rollout_max_response_len
    sample = batch.sample_of_token()
    weight = np.zeros(len(batch.loss_mask), dtype=np.float32)
    denominator = np.ones(len(batch.loss_mask), dtype=np.float32)
    for rollouts in split_rollouts(batch, train.num_steps_per_rollout, train.global_batch_size):
        rows = np.isin(batch.rollout, rollouts)[sample]
        mask = batch.loss_mask[rows]
        weight[rows] = token_weights(mask, batch.rollout[sample[rows]], len(rollouts), train.loss_aggregation, divisor)
        per_token = train.loss_aggregation == "token_mean"
        denominator[rows] = max(float(mask.sum()), 1.0) if per_token else len(rollouts)
    batch.columns[SAMPLE] = sample.astype(np.float32)
    batch.columns[LENGTH] = batch.lengths[sample].astype(np.float32)
    batch.columns[MASK] = batch.loss_mask.copy()
    batch.columns[MASK_SUM] = rollout_mask_sums(batch)[sample].astype(np.float32)
    batch.columns[WEIGHT], batch.columns[DENOMINATOR] = weight, denominator


class NoLogits:
    """Stands for slime's ``logits``: this trainer never holds them whole."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            "logits are never materialised here; use batch['log_probs'] and batch['entropy'], which carry gradients"
        )

    __getitem__ = __getattr__


def wrap(
    inner: Loss,
    session: CompatSession,
    config_of: Callable[[Any], Config],
    functions: Callable[[Any], Mapping[str, Function | None]],
) -> Loss:
    """``inner`` with the loss, correction and reducer that ``functions(train)`` names.

    Args:
        inner: the loss that ``loss_type`` names.
        session: for ``args``.
        config_of: the config a [train] section belongs to.
        functions: [train] section to ``loss``, ``tis`` and ``reducer``.
    """

    def fn(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
        functions_by_name, config = functions(train), config_of(train)
        if functions_by_name["loss"] is not None:
            return _by_function(functions_by_name["loss"], session.args(config), log_probs, entropy, columns)
        if functions_by_name["tis"] is None and functions_by_name["reducer"] is None:
            return inner.fn(log_probs, entropy, columns, train)
        if functions_by_name["tis"] is not None:  # it is called in place of the built-in correction, as in slime
            train = train.model_copy(update=UNCORRECTED)
        plain = train.model_copy(update={"kl_loss_coef": 0.0, "entropy_coef": 0.0})
        whole, metrics = inner.fn(log_probs, entropy, columns, train)
        pg, _ = inner.fn(log_probs, entropy, columns, plain)
        rest, mask = whole - pg, columns[MASK]
        if functions_by_name["tis"] is not None:
            pg, mask, more = _corrected(functions_by_name["tis"], session.args(config), pg, log_probs, columns)
            metrics = {name: value * mask for name, value in metrics.items()} | more
        if functions_by_name["reducer"] is not None:
            pg = _reduced(functions_by_name["reducer"], pg, mask, columns, train)
        else:
            pg = pg * mask
        return pg + rest * mask, metrics

    def needs_when(train: Any) -> frozenset[Role]:
        more = inner.needs_when(train) if inner.needs_when else frozenset()
        return more | ({"policy"} if functions(train)["tis"] is not None else frozenset())

    columns = tuple(dict.fromkeys([*inner.columns, "rollout_log_probs", *EXTRA]))
    return Loss(
        name=inner.name, fn=fn, needs=inner.needs, needs_when=needs_when, columns=columns, prepare=inner.prepare
    )


def _lengths(columns: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Response tokens and total tokens of each sample of a micro-batch, in its order."""
    import torch

    sample = columns[SAMPLE]
    _, counts = torch.unique_consecutive(sample, return_counts=True)
    ends = counts.cumsum(0) - 1
    return counts.tolist(), [int(length) for length in columns[LENGTH][ends].tolist()]


def _corrected(
    fn: Function, args: Any, pg: Any, log_probs: Any, columns: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """The policy loss after a TIS function, its masks, and its metrics, which keep the old ones.

    The masks count in the numerators of the policy loss, KL and entropy, and in no denominator, as in slime.
    """
    import torch

    responses, totals = _lengths(columns)
    loss, masks, metrics = fn(
        args,
        pg_loss=pg,
        train_log_probs=list(_old(log_probs, columns).split(responses)),
        rollout_log_probs=list(columns["rollout_log_probs"].split(responses)),
        loss_masks=list(columns[MASK].split(responses)),
        total_lengths=totals,
        response_lengths=responses,
    )
    named = {f"tis/{name}": _metric(name, value, pg, torch.ones_like(pg)) for name, value in metrics.items()}
    return loss, torch.cat(list(masks)), named


def _old(log_probs: Any, columns: Mapping[str, Any]) -> Any:
    """Log-probs before the step, which are those in training where one optimizer step follows a rollout."""
    return columns["policy"] if "policy" in columns else log_probs.detach()


def _metric(name: str, value: Any, like: Any, spread: Any) -> Any:
    """A metric a token, or a scalar times ``spread``, as a detached tensor [R].

    Raises:
        PluginError: PLG57 another shape.
    """
    import torch

    metric = torch.as_tensor(value, device=like.device).detach()
    if metric.shape == like.shape:
        return metric
    if metric.numel() != 1:
        raise PluginError(
            f"metric '{name}' of a function by path has shape {tuple(metric.shape)}",
            code="PLG57",
            where="train.custom_loss_function_path or train.custom_tis_function_path",
            why=f"the {len(like)} response tokens of a micro-batch have one value each, or one together",
            fix="return a number, or a tensor with one entry a response token",
        )
    return metric.reshape(()).to(like.dtype) * spread


def _reduced(fn: Function, pg: Any, mask: Any, columns: Mapping[str, Any], train: Any) -> Any:
    """The policy loss, scaled so that its weighted sum equals the reducer's result; a reducer is linear."""
    import torch

    responses, totals = _lengths(columns)
    reduce = fn(totals, responses, list(mask.split(responses)), train.loss_aggregation == "token_mean")
    probe = pg.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        value = reduce(probe)
        (share,) = torch.autograd.grad(value, probe)
    if not torch.isclose((share * probe).sum(), value.detach(), rtol=1e-3, atol=1e-5):
        raise PluginError(
            "the reducer of train.custom_pg_loss_reducer_function_path is not linear in the loss",
            code="PLG57",
            where="train.custom_pg_loss_reducer_function_path",
            why="its share of every token must not depend on how a step is split into micro-batches",
        )
    weight = columns[WEIGHT]
    scale = torch.where(weight > 0, share / (columns[DENOMINATOR] * weight.clamp_min(1e-30)), torch.zeros_like(weight))
    return pg * scale


def _by_function(
    fn: Function, args: Any, log_probs: Any, entropy: Any, columns: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A custom loss's scalar, spread over the micro-batch's trainable tokens."""
    import torch

    responses, totals = _lengths(columns)
    weight, denominator = columns[WEIGHT], columns[DENOMINATOR]
    batch: dict[str, Any] = {
        key: list(columns[column].split(responses))
        for key in COLUMNS
        if (column := column_of(key, columns)) in columns
    }
    batch |= {
        "log_probs": list(log_probs.split(responses)),
        "old_log_probs": list(_old(log_probs, columns).split(responses)),
        "entropy": list(entropy.split(responses)) if entropy is not None else None,
        "loss_masks": list(columns[MASK].split(responses)),
        "rollout_mask_sums": [sums[0] for sums in columns[MASK_SUM].split(responses)],
        "response_lengths": responses,
        "total_lengths": totals,
    }

    def sum_of_sample_mean(values: Any) -> Any:
        return (values * weight * denominator).sum()

    loss, metrics = fn(args, batch, NoLogits(), sum_of_sample_mean)
    trains = weight > 0
    count = max(int(trains.sum()), 1)
    spread = torch.where(trains, 1.0 / (denominator * weight.clamp_min(1e-30) * count), torch.zeros_like(weight))
    return loss * spread, {name: _metric(name, value, log_probs, spread) for name, value in metrics.items()}
