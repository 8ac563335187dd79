"""AdamW with moments of 8 bits, by bitsandbytes: blocks of 256 numbers of a rank's shard share a float32 scale.

Dettmers et al. 2021, arXiv 2110.02861. Small tensors keep float32 moments. Paged moments lie in memory that the driver
moves between a GPU and its host as either is short of room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from slime_core.errors import ConfigError, install_line
from slime_core.trainers.fsdp.adamw import AdamW
from slime_core.trainers.fsdp.places import DevicePlace, Named, OtherPlace, Tensors

BLOCK = 256  # numbers that share a scale
SMALL = 4096  # numbers of a tensor whose moments stay float32


@dataclass(slots=True)
class AdamW8bit(AdamW):
    """AdamW whose moments are indices into maps of 256 values, times the largest of their block."""

    scale1: Tensors = field(default_factory=dict)
    scale2: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        library()

    @torch.no_grad()
    def step(self, params: Named, grads: Named, lr: float, scale: float = 1.0, copies: Named | None = None) -> None:
        large = [name for name, tensor in params.items() if name in grads and tensor.numel() >= SMALL]
        self._begin({name: params[name] for name in large if name not in self.moment1})
        states = self.moment1, self.moment2, self.scale1, self.scale2
        for part, tensors in self.place.windows(large, (params, *states), (grads,)):
            for param, moment1, moment2, scale1, scale2, grad in zip(*tensors):
                self._update(param, grad, (moment1, moment2), (scale1, scale2), lr, scale)
            for name, tensor in zip(part, tensors[0]):
                if copies is not None and name in copies:
                    copies[name].copy_(tensor)
        if isinstance(self.place, PagedPlace) and self.place.device.type == "cuda":
            torch.cuda.synchronize()  # the host may read pages that kernels have not written yet
        # AdamW.step: a class with slots is another one than its own zero-argument super() knows
        AdamW.step(self, {name: p for name, p in params.items() if name not in self.scale1}, grads, lr, scale, copies)

    def _begin(self, params: Named) -> None:
        """Moments of zeros: a block whose scale is 0 is one."""
        numbers = {name: blank(p.shape, torch.uint8, p.device) for name, p in params.items()}
        scales = {name: blank(self.scale_shape(p), torch.float32, p.device) for name, p in params.items()}
        for moments, of_blocks in ((self.moment1, self.scale1), (self.moment2, self.scale2)):
            moments |= self.place.zeros_like(numbers)
            of_blocks |= self.place.zeros_like(scales)

    def _update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[torch.Tensor, torch.Tensor],
        lr: float,
        factor: float,
    ) -> None:
        signed, unsigned = _maps(param.device)
        decay = self.weight_decay if param.ndim >= 2 else 0.0
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", grad.contiguous(), param, *moments, self.beta1, self.beta2, 0.0, 0.0, self.eps,
            self.steps + 1, lr, signed, unsigned, *scales, decay, factor, False,
        )  # fmt: skip

    def states(self) -> dict[str, Tensors]:
        return {"moment1": self.moment1, "moment2": self.moment2, "scale1": self.scale1, "scale2": self.scale2}

    def moment_dtype(self, shard: torch.Tensor) -> torch.dtype:
        return torch.uint8 if shard.numel() >= SMALL else torch.float32

    def scale_shape(self, shard: torch.Tensor) -> tuple[int, ...]:
        return (-(-shard.numel() // BLOCK),) if shard.numel() >= SMALL else ()


class PagedPlace(OtherPlace):
    """State lies in memory that a GPU's driver moves to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _empty_like(self, tensors: Named) -> Tensors:
        functional = library().functional
        return {
            name: functional.get_paged(*tensor.shape, dtype=tensor.dtype, device=self.device)
            if self.device.type == "cuda" and tensor.numel() >= SMALL
            else torch.empty_like(tensor, device=self.device)
            for name, tensor in tensors.items()
        }


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def optimizer_of(train: Any, place: DevicePlace, device: torch.device) -> AdamW:
    """The optimizer of the [train] section for parameters of a device, without any steps.

    Raises:
        ConfigError: CFG04 bitsandbytes is needed and not installed.
    """
    settings = train.adam_beta1, train.adam_beta2, train.adam_eps, train.weight_decay
    if train.optimizer == "adamw":
        return AdamW(*settings, place)
    return AdamW8bit(*settings, PagedPlace(device) if train.optimizer == "paged_adamw_8bit" else place)


@cache
def library() -> Any:
    """bitsandbytes.

    Raises:
        ConfigError: CFG04 it is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            "8-bit optimizers are bitsandbytes', which cannot be imported",
            code="CFG04",
            where="train.optimizer",
            why=str(error),
            fix=f"{install_line('bitsandbytes')}   or: --optimizer adamw",
        ) from error
    return bitsandbytes


@cache
def _maps(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the indices of first and second moments."""
    functional = library().functional
    signed, unsigned = (functional.create_dynamic_map(signed=sign).to(device) for sign in (True, False))
    return signed, unsigned
