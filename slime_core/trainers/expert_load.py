"""How many tokens each expert gets in an optimizer step: its figures, and the router biases that follow it.

    rows of a pack -> hooks of a backend count them by expert -> summed over ranks -> figures, and a step of the biases

A router's bias enters the choice of experts and not their weights. Moving it against the load spreads tokens without
a loss beside the policy's (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664; DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from slime_core.errors import TrainerError
from slime_core.trainers.optimizer_step import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import MicroBatch

KEY = "train.moe_router_bias_update_rate"


class ExpertLoad:
    """Counts of the tokens that a rank's passes send to each expert; of a dense model there is nothing to count.

    Example:
        load.reset()
        with load.counting(copies): model(pack)      # hooks call load.add
        figures = load.gather(world)
        load.update_biases(1e-3)
    """

    def __init__(
        self,
        layers: int = 0,
        experts: int = 0,
        device: torch.device | str = "cpu",
        biases: Mapping[int, torch.Tensor] | None = None,
        *,
        biased: bool = False,
    ) -> None:
        self.counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.biases = dict(biases or {})  # of this rank's layers, [experts] float32
        self.biased = biased or bool(biases)  # routers of any rank
        self._copies: torch.Tensor | None = None

    @contextmanager
    def counting(self, copies: NDArray[np.int64]) -> Iterator[None]:
        """Count the rows that are passed inside the block, and not those that a backward pass makes again.

        Args:
            copies: [T], `copies_of_rows` of this rank's rows
        """
        self._copies = to_device(copies, self.counts.device) if self.counts.numel() else None
        try:
            yield
        finally:
            self._copies = None

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """Count a pass's rows, inside of :meth:`counting` alone.

        Args:
            experts: [T, k] integers, each row's experts; or [T, experts] bool, whether a row has an expert
        """
        if self._copies is None:
            return
        copies, counts = self._copies[:, None], self.counts[layer]
        if experts.dtype == torch.bool:
            counts += (experts * copies).sum(0)
        else:
            counts.index_add_(0, experts.reshape(-1).long(), copies.expand_as(experts).reshape(-1))

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts.zero_()

    def gather(self, world: int) -> dict[str, float]:
        """Sum the counts over all ranks, and return their :func:`figures`; a collective."""
        if world > 1 and self.counts.numel():
            dist.all_reduce(self.counts)
        return figures(self.counts.cpu())

    def check(self, rate: float) -> None:
        """Refuse a rate that would move nothing.

        Raises:
            TrainerError: no router has a bias.
        """
        if rate and not self.biased:
            raise TrainerError(
                f"moe_router_bias_update_rate = {rate:g} and no router of this model has a bias",
                where=KEY,
                why="DeepSeek-V3 and GLM-4.5 have e_score_correction_bias; other routers choose by their scores alone",
                fix="leave moe_router_bias_update_rate out",
            )

    @torch.no_grad()
    def update_biases(self, rate: float) -> None:
        """Move each router's bias by the gathered counts, alike on all ranks."""
        for layer, bias in self.biases.items() if rate else ():
            bias.copy_(moved_bias(bias, self.counts[layer], rate))


def moved_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """Return bias + rate * sign(mean load - load), all [experts]: algorithm 1 of arXiv 2408.15664.

    Example: bias [0, 0, 0], load [6, 2, 1], rate 0.1 -> [-0.1, 0.1, 0.1]
    """
    return bias + rate * torch.sign(load.sum() - load * len(load)).to(bias)


def figures(counts: torch.Tensor) -> dict[str, float]:
    """Figures of a step's load, [layers, experts]; layers without tokens, dense ones, are left out.

    MaxVio of a layer is its largest load over the mean load, minus 1 (arXiv 2408.15664): 0 is even, and it reaches
    experts / k - 1 where all tokens have the same k experts.
    """
    load = counts[counts.sum(1) > 0].double()
    if not len(load):
        return {}
    violation = load.max(1).values / load.mean(1) - 1
    return {
        "moe/load_max_violation": float(violation.mean()),
        "moe/load_max_violation/worst_layer": float(violation.max()),
        "moe/dead_experts": float((load == 0).double().mean()),
    }


def copies_of_rows(micro: MicroBatch) -> NDArray[np.int64]:
    """Return how many samples each row of a pack stands for, [T]: several in a shared prompt, none in a filler.

    Counted so, the load of a step does not depend on how its samples are packed or partitioned.
    """
    followers = np.bincount(micro.prefix[micro.prefix >= 0], minlength=len(micro.prefix))
    copies = np.zeros_like(followers) if micro.filler else np.maximum(followers, 1)
    return np.repeat(copies, np.diff(micro.cu_seqlens))
