"""Routers of a transformers model, whose choices of experts are recorded, or replaced by choices made elsewhere.

A router ends in one top-k over the experts of each token. Where a choice is replayed, that top-k answers with the
replayed experts and with the router's own scores of them, so that gradients reach the router:

    own         scores [N, E] -> topk -> scores, experts [N, k]
    replayed    scores [N, E] -> gather(experts) -> scores, experts

which is R3 (Ma et al. 2025, arXiv 2510.11370): the gate's weights are a softmax, or whatever the model has,
of its own logits over the given experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from slime_core.errors import ConfigError
from slime_core.routed_experts import routed_dtype

if TYPE_CHECKING:
    from torch import nn

LAYER = re.compile(r"\.(\d+)\.")
NOT_CHOSEN = -1
"""In place of an expert, in every place of a row: the router chooses itself."""


class RouterChoice(TorchFunctionMode):
    """The choice of one router; entered while its module computes."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.rows: torch.Tensor | None = None  # [N, k], int16 at least: to replay
        self.chosen: torch.Tensor | None = None  # [N, k]: of the last pass
        self.differences: list[torch.Tensor] = []  # tokens whose own choice was another, and replayed tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores, shape = args[0], out.indices.shape
        if scores.ndim != 2 or scores.shape[1] != self.experts or shape[1] != self.top_k:
            return out  # of groups of experts, say
        return torch.return_types.topk(self.choose(scores, out.values, out.indices))

    def choose(
        self, scores: torch.Tensor, values: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts [N, k] in place of the router's own ``experts`` and their ``values``."""
        self.chosen = experts
        if self.rows is None:
            return values, experts
        replayed = self.rows[:, :1] != NOT_CHOSEN
        self.chosen = torch.where(replayed, self.rows, experts)
        with torch.no_grad():
            differs = (self.chosen.sort(-1).values != experts.sort(-1).values).any(-1)
            self.differences.append(torch.stack([differs.sum(), replayed.sum()]))
        return scores.gather(1, self.chosen), self.chosen


class Routers:
    """All routers of a model, in the order of its layers. Idle, they cost an ``if`` a layer.

    Example:
        routers = Routers(model)
        with routers.recording():
            model(tokens)
        with routers.replaying(routers.rows()):
            model(tokens)  # the same numbers

    Raises:
        ConfigError: CFG04, a model without routers, or with some whose choice cannot be replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.choices: list[RouterChoice] = []
        self.layers: list[int] = []  # of the model, which of them have experts
        self._active = False
        for name, module in model.named_modules():
            weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
            if isinstance(top_k, int) and isinstance(weight, torch.Tensor) and weight.ndim == 2:
                if getattr(module, "topk_method", "greedy") != "greedy":
                    raise _not_replayed(model, f"{name} scores experts outside of the chosen groups as 0")
                place = LAYER.search(name)
                self.layers.append(int(place[1]) if place else len(self.layers))
                self.choices.append(self._follow(module, RouterChoice(len(weight), top_k)))
        if not self.choices:
            raise _not_replayed(model, "no module of it is a router with top_k and weight")

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, and experts a token."""
        return len(self.choices), self.choices[0].top_k

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """Of recorded choices."""
        return routed_dtype(self.choices[0].experts)

    def _follow(self, module: nn.Module, choice: RouterChoice) -> RouterChoice:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return plain(*args, **kwargs)
            with choice:
                return plain(*args, **kwargs)

        module.forward = torch.compiler.disable(forward)
        return choice

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the choices of a pass inside the block, for :meth:`rows`."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @contextmanager
    def replaying(self, rows: torch.Tensor) -> Iterator[None]:
        """Replay ``rows`` [N, layers, k] in the passes of the block, made again in the backward pass too."""
        for layer, choice in enumerate(self.choices):
            choice.rows = rows[:, layer]
        try:
            with self.recording():
                yield
        finally:
            for choice in self.choices:
                choice.rows = None

    def rows(self) -> torch.Tensor:
        """[N, layers, k], what the last pass chose."""
        return torch.stack([choice.chosen for choice in self.choices if choice.chosen is not None], dim=1)

    def differences(self) -> tuple[int, int]:
        """See the function."""
        return differences(self.choices)


def differences(choices: Iterable[RouterChoice]) -> tuple[int, int]:
    """(Token, layer) pairs whose own choice was another than the replayed, and all that were replayed, since the last
    call."""
    parts = []
    for choice in choices:
        parts += choice.differences
        choice.differences.clear()
    differing, replayed = torch.stack(parts).sum(0).tolist() if parts else (0, 0)
    return differing, replayed


def _not_replayed(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"the experts of {type(model).__name__} cannot be replayed",
        code="CFG04",
        where="train.routing_replay",
        why=why,
        fix="--routing-replay off",
    )
