"""On a GPU, the fingerprint of the weights is the processor's."""

import pytest
import torch

from slime_core.trainers.base_checksums import sums_of
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_an_adapters_base_are_those_of_the_host(dtype):
    torch.manual_seed(0)
    shapes = {"embedding": (5000, 512), "stack": (8, 300, 128), "norm": (512,), "odd": (77, 33), "one": ()}
    weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    on_host, on_gpu = (
        sums_of({name: (tensor.to(device), 0) for name, tensor in weights.items()}, 1) for device in ("cpu", "cuda")
    )
    assert on_gpu == on_host
