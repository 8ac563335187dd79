"""Float32 parameters that are sharded by rows in, the checksum of `trainers.fingerprint` out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from slime_core.trainers.fingerprint import digest, sums
from slime_core.trainers.fsdp.sharding import first_row, local


@torch.no_grad()
def fingerprint(parameters: Mapping[str, torch.Tensor], world: int) -> str:
    """The checksum of parameters by name, which may be sharded by rows; a collective.

    Every rank gets the same answer: 32 hex digits.
    """
    names = sorted(parameters)
    found = []
    for name in names:
        parameter = parameters[name].detach()
        width = parameter[:1].numel() if parameter.ndim > 1 else 1
        found.append(sums(local(parameter), first_row(parameter) * width))
    total = torch.stack(found) if found else torch.zeros(0, 2, dtype=torch.int64)
    if world > 1:
        dist.all_reduce(total)
    return digest({n: (list(parameters[n].shape), pair) for n, pair in zip(names, total.tolist(), strict=True)})
