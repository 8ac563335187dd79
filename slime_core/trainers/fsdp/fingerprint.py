"""Float32 parameters that are sharded by rows in, the checksum of `trainers.fingerprint` out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from slime_core.trainers.fingerprint import BLOCK, digest, table
from slime_core.trainers.fsdp.sharding import first_row, local

AT_ONCE = 256  # blocks a kernel takes on a GPU


@torch.no_grad()
def sums(shard: torch.Tensor, start: int) -> torch.Tensor:
    """Both sums of a shard whose first element is element ``start`` of its tensor: [2] int64."""
    flat = shard.reshape(-1).view(torch.int32)
    mixed, done = table(flat.device), 0
    first, second = [], []
    while done < len(flat):
        block, inside = divmod(start + done, BLOCK)
        count = min(BLOCK - inside, len(flat) - done)
        many = 1 if inside else max(1, min((len(flat) - done) // BLOCK, AT_ONCE if flat.is_cuda else 1))
        bits = flat[done : done + max(count, many * BLOCK if many > 1 else 0)].to(torch.int64)
        first.append(bits.sum())
        if many > 1:  # whole blocks, a kernel for all of them
            odd = torch.arange(block, block + many, device=flat.device) * 2 + 1
            second.append(((bits.view(many, BLOCK) * mixed).sum(1) * odd).sum())
        else:
            mine = mixed[inside : inside + count]
            second.append(((bits * mine).sum() if flat.is_cuda else torch.dot(bits, mine)) * (2 * block + 1))
        done += len(bits)
    if not first:
        return torch.zeros(2, dtype=torch.int64, device=flat.device)
    return torch.stack((torch.stack(first).sum(), torch.stack(second).sum()))


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
