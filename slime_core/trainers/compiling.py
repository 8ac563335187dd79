"""Compiling by torch.compile where that pays; a compiler that fails is reported once, and left.

On a GPU a layer's norms, rotations, activations and residuals are some fifty small kernels that wait for memory; fused
they are a handful. Results differ by rounding: what is fused is not rounded to bfloat16 in between.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch._dynamo.exc import TorchDynamoException

from slime_core.notices import notice

log = logging.getLogger(__name__)

Choice = Literal["auto", "on", "off"]
COMPILING = (
    "compiling functions of the trainer's model (torch.compile): the first scoring and the first training step wait "
    "for it, some ten seconds each; without it: --compile off"
)
LARGE = 1_000_000_000  # parameters from which a step takes longer than what compiling could save in a short run


def pays(choice: Choice, device: torch.device, parameters: int) -> bool:
    """Whether ``train.compile`` means yes on this device for a model of so many parameters."""
    if choice != "auto":
        return choice == "on"
    return device.type == "cuda" and parameters >= LARGE and find_spec("triton") is not None


class Compiled:
    """A function that is compiled at its first call for each kind of arguments, or ``plain`` once that has failed.

    What the function itself raises passes through.

    Example: norm = Compiled(rms_norm); norm(x, weight)
    """

    def __init__(self, plain: Callable[..., Any], **options: Any) -> None:
        self.plain = plain
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there
        self._compiled: Callable[..., Any] | None = torch.compile(plain, **options)
        self._called = False

    @property
    def works(self) -> bool:
        """Whether compiling has not failed."""
        return self._compiled is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            return self.plain(*args, **kwargs)
        if not self._called:
            self._called = True
            notice("compile", COMPILING)
        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._compiled = None
            log.warning(
                "%s is not compiled, and slower: %s", self.plain.__qualname__, " ".join(str(error).split())[:300]
            )
            return self.plain(*args, **kwargs)
