"""What a candidate's model has in its attributes: nothing that a call puts there is there in the next.

Runs inside the candidate's process. An answer depends on its inputs alone; what is kept for speed is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slime_kernelbench.judge.tensors import tensors_of


class Attributes:
    """The attributes of a model's modules, as they are when this is made.

    Example:
        before = Attributes(model)
        output = model(x)
        before.restore(output)      # ["kept"] where the output is model.kept, else []
    """

    def __init__(self, model: Any) -> None:
        self._pairs = [(now, dict(now)) for now in _attributes(model)]

    def restore(self, output: Any) -> list[str]:
        """Put them back; names of those that were new and hold memory of the output."""
        answer = {_place(tensor) for tensor in tensors_of(output)}
        restored: list[str] = []
        for now, before in self._pairs:
            new = {name: value for name, value in now.items() if name not in before or before[name] is not value}
            restored += [str(name) for name, value in new.items() if answer & set(map(_place, tensors_of(value)))]
            if new or len(now) != len(before):
                now.clear()
                now.update(before)
        return restored


def _attributes(model: Any) -> Iterator[dict[str, Any]]:
    for module in torch.nn.Module.modules(model) if isinstance(model, torch.nn.Module) else ():
        yield from (module._parameters, module._buffers, module._modules, vars(module))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
