"""A server's rank in a test: joins a group with torch's own means, as SGLang does, and receives what it is told to.

Each line of stdin is a call and its answer a line of stdout:  join HANDLE RANK | take HANDLE FOLDER | half HANDLE
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as inner

DEVICE = torch.device(os.environ.get("SLIME_PEER_DEVICE", "cpu"))


def join(handle, rank):
    """What `init_custom_process_group` of SGLang does."""
    limit = timedelta(seconds=60)
    store, rank, world = next(dist.rendezvous(f"tcp://{handle['address']}", rank, handle["world"], timeout=limit))
    store.set_timeout(limit)
    store = inner.PrefixStore(handle["group"], store)
    backend = inner.Backend(handle["backend"])
    group, _ = inner._new_process_group_helper(
        world, rank, [], backend, store, group_name=handle["group"], timeout=limit
    )
    inner._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return group


def receive(group, bucket):
    """SGLang's `flattened_bucket` of one broadcast."""
    sizes = [(torch.Size(shape), getattr(torch, dtype)) for shape, dtype in zip(bucket["shapes"], bucket["dtypes"])]
    total = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
    flat = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    dist.broadcast(flat, src=0, group=group)
    found, place = {}, 0
    for name, (shape, dtype) in zip(bucket["names"], sizes):
        end = place + shape.numel() * dtype.itemsize
        found[name] = flat[place:end].view(dtype).reshape(shape).cpu().clone()
        place = end
    return found


group = None
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
for line in sys.stdin:
    word, handle, *more = json.loads(line)
    if word == "join":
        group = join(handle, more[0])
    elif word == "take":
        taken = {}
        for bucket in handle["buckets"]:
            taken |= receive(group, bucket)
        save_file(taken, os.path.join(more[0], f"taken-{handle['number']}.safetensors"))
    else:
        receive(group, handle["buckets"][0])
    print(word, flush=True)
