"""A micro-batch as one rank computes it: all rows of its pack, or those that this rank has of them.

pack --rows of this rank--> model -> log-probs of the response tokens that they predict --spread--> of all, [R]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from slime_core.trainers.expert_load import copies_of_rows
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.optimizer_step import to_device
from slime_core.trainers.vision import PackPixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.trainers.fsdp.ranks import FsdpRanks
    from slime_core.types import MicroBatch

Number = TypeVar("Number", bound=np.generic)


class ResponseTokens:
    """The response tokens of a pack. No dataclass, in which FSDP would turn temperatures to the dtype of compute."""

    __slots__ = ("predict", "target", "temperature")

    def __init__(self, predict: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor | None) -> None:
        self.predict = predict  # [R] int64, rows of the pack
        self.target = target  # [R] int64, token ids
        self.temperature = temperature  # [R] float32; None is 1


class RankPack:
    """A micro-batch for a model whose packs ``ranks`` share; None: this rank has all of it.

    The last rows of a rank may lie behind the pack's end: they repeat its first token, and nothing reads them.
    """

    def __init__(self, micro: MicroBatch, device: torch.device, ranks: FsdpRanks | None = None) -> None:
        self.micro, self.device, self._ranks = micro, device, ranks
        count = len(micro.tokens)
        rows = np.arange(count) if ranks is None else ranks.places(count)
        self.behind = rows >= count  # [t], rows behind the pack's end
        self.rows = np.where(self.behind, 0, rows)  # [t], of the pack
        self.own_tokens = np.arange(len(micro.predict)) if ranks is None else ranks.own_rows(micro.predict)
        self.speaks = ranks is None or ranks.number == 0  # for the ranks that share it

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, PackSegments]:
        """Tokens of this rank's rows, their positions, and the segments of the whole pack, as a model takes them."""
        micro = self.micro
        exchange = self._ranks.exchange(len(micro.tokens)) if self._ranks is not None else None
        segments = PackSegments.of(micro.cu_seqlens, micro.prefix, self.device, exchange)
        tokens, positions = (to_device(x[..., self.rows], self.device) for x in (micro.tokens, micro.position_ids))
        return tokens, positions, segments

    @property
    def pixels(self) -> PackPixels | None:
        """Arrays of the pack's pictures, read to the device, and which features are rows of this rank."""
        size, number = (1, 0) if self._ranks is None else (self._ranks.size, self._ranks.number)
        return PackPixels.of(self.micro.media, self.device, size, number)

    def predicting(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Rows of this rank that predict some of its own response tokens."""
        size = 1 if self._ranks is None else self._ranks.size
        return to_device(self.micro.predict[tokens] // size, self.device)

    def response_tokens(self, tokens: NDArray[np.int64], temperature: torch.Tensor | None) -> ResponseTokens:
        """Some of this rank's own response tokens; ``temperature`` is of all, [R]."""
        if temperature is not None and len(tokens) < len(temperature):
            temperature = temperature[torch.from_numpy(tokens).to(temperature.device)]
        return ResponseTokens(self.predicting(tokens), to_device(self.micro.target[tokens], self.device), temperature)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of each rank's own response tokens as all of them on every rank, [R]; a collective."""
        return values if self._ranks is None else self._ranks.spread(values, self.own_tokens, len(self.micro.predict))

    def copies(self) -> NDArray[np.int64]:
        """How many samples each of this rank's rows stands for; none behind the end."""
        return self.of_rows(copies_of_rows(self.micro), 0)

    def of_rows(self, values: NDArray[Number], behind: int) -> NDArray[Number]:
        """This rank's rows of a pack's values, [T, ...] to [t, ...]; ``behind`` is the value behind the end."""
        if self._ranks is None:
            return values
        part = values[self.rows]
        part[self.behind] = behind
        return part
