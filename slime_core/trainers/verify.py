"""A step's gradient as a trainer makes it, against the slow way, which shares nothing with it but the loss.

fast: packs, fused layers, segment attention, blocks of logits, sharded parameters, all as in the step itself
slow: transformers' own model and eager attention, one sample at a time, the full log-softmax, plain autograd, and the
      loss over all tokens of the optimizer step at once

The chain rule is cut at log-prob and entropy, so that the graph of one sample is alive at a time. Every optimizer step
of the batch is compared at the weights before the first. Nothing is changed.

In bfloat16 rounding alone moves the gradient of some tensors by half of their norm and more. So the slow way is gone a
second time, in bfloat16, and a tensor may differ by a few times what that rounding does to it. What it differs along
the true gradient is bounded apart: rounding hardly changes a gradient's size, and most mistakes do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.algorithms.shared.aggregate import token_weights
from slime_core.media.features import text_model
from slime_core.trainers.optimizer_step import to_device
from slime_core.trainers.packing import split_rollouts
from slime_core.trainers.vision import PackPixels, tower_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.protocols import Loss
    from slime_core.trainers.media import BatchMedia
    from slime_core.types import Batch, MicroBatch

FLOAT64_UP_TO = 10**8  # parameters on a CPU; above, and elsewhere, the slow way computes in float32
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of the errors, by the trainer's dtype of compute
ROUNDINGS = 3.0  # times what rounding does to a tensor's gradient, which always pass
FLOORS = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Of the gradient's norm: a parameter with less (a bias whose true gradient is 0) is measured by this."""
Tensors = dict[str, torch.Tensor]
Fast = Callable[["list[MicroBatch]"], tuple[float, Tensors]]
"""An optimizer step's loss, and every gradient in float64 on the host; a collective."""
Rename = Callable[[Tensors], Tensors]


def compared(batch: Batch, micros: list[list[MicroBatch]], fast: Fast, slow: Slow) -> dict[str, float]:
    """Errors of one step's loss and gradients; a collective.

    ``gradient_error`` is the largest ``gradient_error/PARAMETER``, see :func:`compare`.
    ``loss_error`` is |fast - slow| over the sum of the absolute losses of all tokens. Of several optimizer steps the
    worst counts. ``limit`` is what both should stay below, ``float64`` whether the slow way computes in it.

    Args:
        batch: with the columns that `batch.prepared` adds
        micros: of each optimizer step, this rank's
    """
    train = slow.stage.train
    again = slow.rounded() if slow.computed != torch.float32 else None
    steps = split_rollouts(batch, train.num_steps_per_rollout, train.global_batch_size)
    errors: dict[str, float] = {}
    losses, loss_error = [], 0.0
    for rollouts, step_micros in zip(steps, micros, strict=True):
        tokens = np.isin(batch.rollout, rollouts)[batch.sample_of_token()]
        if not batch.loss_mask[tokens].any():
            continue
        loss, gradients = fast(step_micros)
        want, scale, grads = slow.gradient(batch, rollouts, tokens)
        losses.append(loss)
        loss_error = max(loss_error, _ratio(abs(loss - want), scale))
        rounded = slow.rename(again.gradient(batch, rollouts, tokens)[2]) if again is not None else None
        for name, error in compare(gradients, slow.rename(grads), slow.computed, rounded).items():
            errors[name] = max(errors.get(name, 0.0), error)
    return {
        "loss": sum(losses) / max(len(losses), 1),
        "loss_error": loss_error,
        "gradient_error": max(errors.values(), default=0.0),
        "limit": LIMITS[slow.computed],
        "float64": float(slow.dtype == torch.float64),
        **{f"gradient_error/{name}": error for name, error in errors.items()},
    }


def compare(fast: Tensors, slow: Tensors, computed: torch.dtype, rounded: Tensors | None = None) -> dict[str, float]:
    """Error of each parameter's gradient, largest first; NaN counts as infinite.

    It is the larger of |fast - slow| and of what that is along slow, both over |slow| and Euclidean. Where ``rounded``
    is given, a difference of ROUNDINGS times its own passes: its error is the limit.
    """
    limit = LIMITS[computed]
    least = FLOORS[computed] * float(torch.stack([grad.norm() for grad in slow.values()]).norm())
    errors = {}
    for name, grad in slow.items():
        size = float(grad.norm())
        bounds = _rounding(rounded[name] - grad, grad, size) if rounded is not None else (0.0, 0.0)
        scales = [max(size, least, ROUNDINGS * bound / limit) for bound in bounds]
        errors[name] = max(map(_ratio, _apart(fast[name] - grad, grad, size), scales))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _apart(difference: torch.Tensor, grad: torch.Tensor, size: float) -> tuple[float, float]:
    """Norm of a difference, and of its part along the gradient."""
    return float(difference.norm()), abs(float((difference * grad).sum())) / size if size else 0.0


def _rounding(difference: torch.Tensor, grad: torch.Tensor, size: float) -> tuple[float, float]:
    """What another rounding would differ by; along the gradient at least as with independent signs."""
    norm, along = _apart(difference, grad, size)
    return norm, max(along, float((difference * grad).norm()) / size if size else 0.0)


def _ratio(part: float, whole: float) -> float:
    if not np.isfinite(part) or (whole == 0 and part > 0):
        return float("inf")
    return part / whole if whole else 0.0


def slow_model(model: Any, device: torch.device) -> Any:
    """transformers' model on the device, in float64 where that is feasible, its experts one after another."""
    small = sum(p.numel() for p in model.parameters()) <= FLOAT64_UP_TO and device.type == "cpu"
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model.to(device, torch.float64 if small else torch.float32).eval().requires_grad_(True)


@dataclass(slots=True, frozen=True)
class Slow:
    """The model as transformers has it, with the weights that ranks hold together; each rank takes some samples."""

    model: Any
    stage: Config
    loss: Loss
    computed: torch.dtype  # the trainer computes in it
    rank: int
    world: int
    rename: Rename = dict  # gradients by the names of the model's modules to the names that the fast way gives
    media: BatchMedia | None = None  # of a model that sees pictures

    @property
    def dtype(self) -> torch.dtype:
        """What this way computes in."""
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def exact(self) -> torch.dtype:
        """Of log-probs and of the loss, which are never rounded to bfloat16."""
        return torch.promote_types(self.dtype, torch.float32)

    def rounded(self) -> Slow:
        """The same, computing in the trainer's dtype."""
        return replace(self, model=copy.deepcopy(self.model).to(self.computed))

    @property
    def device(self) -> torch.device:
        """Where."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    def gradient(
        self, batch: Batch, rollouts: NDArray[np.int64], tokens: NDArray[np.bool_]
    ) -> tuple[float, float, Tensors]:
        """Loss of an optimizer step, the sum of its tokens' absolute losses, and every gradient in float64.

        Args:
            rollouts: ids of the step's rollouts
            tokens: [R] bool, the step's
        """
        chosen = np.isin(batch.rollout, rollouts) & (batch.response_lengths > 0)
        samples: list[int] = np.flatnonzero(chosen).tolist()
        local_samples = samples[self.rank :: self.world]
        both = torch.zeros(2, len(tokens), dtype=self.exact, device=self.device)
        with torch.no_grad():
            for i in local_samples:
                both[:, _place(batch, i)] = self.rows(batch, i)
        if self.world > 1:
            dist.all_reduce(both)
        total, scale, slopes = self._loss(batch, rollouts, tokens, both)
        self.model.zero_grad()
        sums: Tensors = {}
        for i in local_samples:
            (self.rows(batch, i) * slopes[:, _place(batch, i)]).sum().backward()
            self._add(sums)
        grads = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:  # frozen
                continue
            grad = sums[name] if name in sums else torch.zeros_like(parameter, dtype=self.exact)
            if self.world > 1:
                dist.all_reduce(grad)
            grads[name] = grad.double().cpu()
        return total, scale, grads

    def _add(self, sums: Tensors) -> None:
        """Add a sample's gradients, each rounded once in bfloat16; elsewhere autograd adds them."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and self.dtype == self.exact:
                sums[name] = parameter.grad
            elif parameter.grad is not None:
                sums[name] = parameter.grad.to(self.exact) + sums.get(name, 0)
                parameter.grad = None

    def rows(self, batch: Batch, i: int) -> torch.Tensor:
        """Log-prob and entropy of each response token of sample i, [2, its response tokens]."""
        ids = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64)).to(self.device)
        count = int(batch.response_lengths[i])
        logits = self._logits(batch, i, ids)[-count - 1 : -1].to(self.exact)
        if batch.temperature is not None:
            logits = logits / float(batch.temperature[i])
        table = torch.log_softmax(logits, dim=-1)
        return torch.stack((table[torch.arange(count), ids[-count:]], -(table.exp() * table).sum(-1)))

    def _logits(self, batch: Batch, i: int, ids: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary] of sample i, whose features stand in the places of its pictures."""
        media, positions = self.media.of_sample(batch, i) if self.media is not None else (None, None)
        if media is None or not media.items:
            return self.model(input_ids=ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]
        arguments: dict[str, Any] = {"use_cache": False}
        if positions is not None:
            arguments["position_ids"] = to_device(positions, self.device)[:, None]
        tower = tower_of(self.model)
        assert tower is not None
        embeddings, more = tower.embeddings(ids, PackPixels.of(media, self.device))
        hidden = text_model(self.model)(inputs_embeds=embeddings, **arguments, **more).last_hidden_state
        return self.model.get_output_embeddings()(hidden)[0]  # type: ignore[no-any-return]

    def _loss(
        self, batch: Batch, rollouts: NDArray[np.int64], tokens: NDArray[np.bool_], both: torch.Tensor
    ) -> tuple[float, float, torch.Tensor]:
        """The loss, its scale, and its derivatives by log-prob and entropy, [2, R]."""
        train, of_token = self.stage.train, batch.sample_of_token()
        weights = token_weights(
            batch.loss_mask[tokens],
            batch.rollout[of_token[tokens]],
            len(rollouts),
            train.loss_aggregation,
            train.loss_divisor or self.stage.rollout.rollout_max_response_len,
        )
        columns = {**batch.columns, "loss_mask": batch.loss_mask, "sample": of_token}
        tensors = {name: torch.from_numpy(values[tokens]).to(self.device) for name, values in columns.items()}
        tensors = {name: v.to(self.exact) if v.is_floating_point() else v for name, v in tensors.items()}
        where = torch.from_numpy(tokens).to(self.device)
        weight = torch.from_numpy(weights).to(self.device, self.exact)
        log_probs, entropy = (row[where].requires_grad_() for row in both)
        if "policy" in tensors and self.computed != torch.float32:
            tensors["policy"] = (
                log_probs.detach()
            )  # scored in bfloat16 by these weights: its rounding passes narrow clips
        values, _ = self.loss.fn(log_probs, entropy, tensors, train)
        parts = torch.where(weight > 0, values * weight, 0)
        gradients = torch.autograd.grad(parts.sum(), (log_probs, entropy), allow_unused=True)
        slopes = torch.zeros_like(both)
        for row, slope in zip(slopes, gradients):
            if slope is not None:
                row[where] = slope
        return float(parts.detach().sum()), float(parts.detach().abs().sum()), slopes


def _place(batch: Batch, i: int) -> slice:
    return slice(int(batch.response_offsets[i]), int(batch.response_offsets[i + 1]))
