"""AdamW with moments of 8 bits on a GPU: near the CPU's, and the same bits where the moments are paged or resumed."""

import pytest
import torch

from slime_core.trainers.fsdp.adamw_8bit import AdamW8bit, PagedPlace
from slime_core.trainers.fsdp.places import DevicePlace, HostPlace

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes")

DEVICE = torch.device("cuda", 0)
PLACES = {"device": DevicePlace, "host": lambda: HostPlace(DEVICE), "paged": lambda: PagedPlace(DEVICE)}


def steps(optimizer, params, first, last):
    """The optimizer's steps by gradients of their number."""
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        grads = {name: torch.randn(p.shape, generator=draw).to(p.device) for name, p in params.items()}
        optimizer.step(params, grads, lr=0.01, scale=0.5)


def trained(place, device):
    """Parameters after four steps; of a GPU also by an optimizer that takes the states of two of them."""
    start = torch.randn(300, 512, generator=torch.Generator().manual_seed(9)).to(device)
    settings = 0.9, 0.98, 1e-8, 0.1
    params, optimizer = {"w": start.clone()}, AdamW8bit(*settings, place())
    steps(optimizer, params, 0, 2)
    resumed, again = {"w": params["w"].clone()}, AdamW8bit(*settings, place(), optimizer.steps)
    for kind, tensors in again.states().items():
        tensors |= again.place.keep({name: state.clone() for name, state in optimizer.states()[kind].items()})
    for one, weights in ((optimizer, params), (again, resumed)):
        steps(one, weights, 2, 4)
    assert torch.equal(params["w"], resumed["w"])
    return params["w"].cpu()


def test_steps_are_those_of_a_cpu_and_of_any_place():
    cpu = trained(DevicePlace, torch.device("cpu"))
    by_place = {name: trained(place, DEVICE) for name, place in PLACES.items()}
    assert torch.equal(by_place["device"], by_place["host"])
    assert torch.equal(by_place["device"], by_place["paged"])
    assert (by_place["device"] - cpu).norm() < 0.02 * cpu.norm()
