"""How much a reference works: the largest tensor that it makes on its way to an answer.

Kernels in the interpreter take time for every block of it, whether they ever hold it in one piece or not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class TooLarge(Exception):
    """A reference makes a larger tensor than candidates have time for."""


class Bounded(TorchFunctionMode):
    """Raises `TooLarge` where a tensor of more than ``most`` elements is made, attention's scores among them.

    Example:
        with Bounded(72_000):
            model(*inputs)
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [result.numel()] if isinstance(result, torch.Tensor) else []
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key = [*args, *(kwargs or {}).values()][:2]
            sizes.append(math.prod(query.shape[:-1]) * int(key.shape[-2]))
        if max(sizes, default=0) > self._most:
            raise TooLarge(f"on its way it makes a tensor of {max(sizes)} elements, the most is {self._most}")
        return result
