"""On a GPU, the fingerprint of the weights is the processor's."""

import pytest
import torch

from slime_core.trainers.fingerprint import all_sums
from slime_core.trainers.fsdp.model import fingerprint

pytestmark = pytest.mark.gpu


def test_a_fingerprint_is_the_processors():
    draw = torch.Generator("cpu").manual_seed(0)
    shapes = {"b": (500, 700), "a": (3,), "empty": (0, 4), "scalar": (), "c": (2**20 + 5, 3)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    assert fingerprint({name: tensor.cuda() for name, tensor in tensors.items()}, 1) == fingerprint(tensors, 1)


@pytest.mark.parametrize("start", [0, 7, 2**16 - 1, 3 * 2**16 + 5, 1 << 33])
def test_a_shard_sums_as_on_the_processor(start):
    run = torch.randn(300_001, generator=torch.Generator("cpu").manual_seed(1))
    assert torch.equal(all_sums([(run.cuda(), start)]).cpu(), all_sums([(run, start)]))
