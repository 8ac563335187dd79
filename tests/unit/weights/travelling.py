"""Tensors on their way, for the tests of transports."""

import torch

from slime_core.types import Piece, RankTensor
from slime_core.weights.hashing import Checksums
from slime_core.weights.transports.buckets import Tally, TensorPart, TensorSource, stream

QK = RankTensor(name="a.qk.weight", pieces=(Piece(name="a.q.weight"), Piece(name="a.k.weight")))
TOP = RankTensor(name="embed.weight", rank=1, pieces=(Piece(name="embed.weight", start=17),))


def tensors_of(seed=0):
    """Tensors of odd sizes, in float32, whose values bfloat16 has to round."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (33, 8), "a.q.weight": (8, 8), "a.k.weight": (4, 8), "a.norm": (7,), "b.weight": (65, 9)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sources_of(tensors):
    """A source a tensor."""
    return [
        TensorSource((TensorPart(name, tuple(t.shape), lambda whole: whole),), lambda t=t: t)
        for name, t in tensors.items()
    ]


def sent(sender, tensors, route, version=4, sums=Checksums):
    """The handle and checksums of one update."""
    sources, tally = sources_of(tensors), Tally(route, sums)
    parts = [part for source in sources for part in source.parts]
    return sender.send(parts, stream(sources), version, route, tally), tally.finish()
