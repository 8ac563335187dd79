"""The load of experts over a pipeline's stages, and auxiliary losses of routers at the weight that their flags give.

megatron-core multiplies an auxiliary loss of a micro-batch by the rows of the rank, and divides gradients by all
tokens in the end. Here weights of tokens are those of the whole step and nothing is divided, so coefficients are, by
the rows of the step: what is added to the loss is coefficient times the mean of the micro-batches' losses, by rows.
Rows that only fill a pack up count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from slime_core.trainers.expert_load import ExpertLoad

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_megatron.model import ModelStage

COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def watch(stage: ModelStage) -> ExpertLoad:
    """Have every router of the stage count its rows by expert; layers are numbered in the whole model."""
    config, routers = stage.config, stage.routers()
    if not config.num_moe_experts:
        return ExpertLoad()
    biased = bool(config.moe_router_enable_expert_bias)
    biases = {layer: router.expert_bias for layer, router in routers.items()} if biased else {}
    device = next(stage.parameters()).device
    load = ExpertLoad(config.num_layers, config.num_moe_experts, device, biases, biased=biased)
    for layer, router in routers.items():
        _count(load, layer, router)
    return load


def _count(load: ExpertLoad, layer: int, router: torch.nn.Module) -> None:
    def hook(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        load.add(layer, output[1])

    router.register_forward_hook(hook)


class BalancedRouter(TopKRouter):  # type: ignore[misc]
    """Multiplies an auxiliary loss by the rows of all ranks that share it; megatron-core's own by those of each."""

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """See `TopKRouter.routing`; ``padding_mask`` is True at rows that fill up."""
        if padding_mask is not None:
            self._rows = (~padding_mask).sum().float()
        return super().routing(logits, padding_mask)

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, name: str, group: Any, **more: Any
    ) -> torch.Tensor:
        """Add this rank's part of a loss of the whole group's rows; a collective of the group."""
        rows = self._rows.clone()
        dist.all_reduce(rows, group=group)
        more["valid_token_count"] = rows / self.tp_cp_group.size()
        attached: torch.Tensor = super().attach_and_log_load_balancing_loss(
            activation, coefficient, loss, name, group, **more
        )
        return attached

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Count nothing: `watch` does."""


@contextmanager
def auxiliary_losses(config: TransformerConfig, rows: int, device: torch.device) -> Iterator[bool]:
    """Divide the coefficients of auxiliary losses by the rows of an optimizer step, inside the block: whether any is.

    Args:
        rows: of all micro-batches of this rank, whole ones; ranks with other micro-batches have theirs
    """
    coefficients = {name: getattr(config, name) for name in COEFFICIENTS if _is_set(getattr(config, name))}
    if not config.num_moe_experts:
        coefficients = {}
    if coefficients:
        total = torch.tensor(float(rows), device=device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        ranks = parallel_state.get_tensor_and_context_parallel_group().size()
        for name, value in coefficients.items():
            setattr(config, name, _divided(value, float(total) / ranks))
    try:
        yield bool(coefficients)
    finally:
        for name, value in coefficients.items():
            setattr(config, name, value)


def _is_set(coefficient: Any) -> bool:
    return any(coefficient) if isinstance(coefficient, list) else bool(coefficient)


def _divided(coefficient: Any, total: float) -> Any:
    return [one / total for one in coefficient] if isinstance(coefficient, list) else coefficient / total
