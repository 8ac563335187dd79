"""Masters of one rank in half precision."""

import pytest
import torch

from slime_core.kernels.linear import joined
from slime_core.trainers.fsdp.masters import Masters

pytestmark = pytest.mark.unit


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))


def test_gradients_of_several_passes_are_summed_in_float32_and_none_in_half_precision_stays():
    model = small()
    masters = Masters(model, torch.bfloat16, exact=(model[2],))
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        name: torch.float32 if name.startswith("2") else torch.bfloat16 for name in masters.weights
    }
    wanted: dict = {}
    for number in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)).bfloat16()

        def loss(x=x):
            return model[2](model[1](model[0](x)).float()).square().sum()

        for name, grad in zip(masters.weights, torch.autograd.grad(loss(), list(model.parameters()))):
            wanted[name] = wanted[name] + grad.float() if name in wanted else grad.float()
        loss().backward()
    assert all(p.grad is None for p in masters.copies.values())
    sums = masters.gradients()
    assert list(sums) == list(masters.weights)
    for name, total in sums.items():
        assert total.dtype == torch.float32
        assert torch.equal(total, wanted[name]), name
    masters.forget()
    assert masters.gradients() == {}


def test_the_copy_follows_the_masters_when_it_is_told_to():
    model = small()
    masters = Masters(model, torch.bfloat16)
    with torch.no_grad():
        masters.weights["0.weight"].add_(1)
    assert not torch.equal(model[0].weight, masters.weights["0.weight"].bfloat16())
    masters.refresh()
    assert torch.equal(model[0].weight, masters.weights["0.weight"].bfloat16())
    other = {name: torch.zeros_like(weight) for name, weight in masters.weights.items()}
    masters.refresh(other)
    assert all(not parameter.any() for parameter in model.parameters())


def test_matrices_that_lie_side_by_side_are_joined_without_a_copy():
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(16, 2))
    first, second = model[0].weight.detach(), model[1].weight.detach()
    assert torch.equal(joined([first, second]), torch.cat([first, second]))
    masters = Masters(model, torch.bfloat16)
    one = joined([model[0].weight, model[1].weight])
    assert one.data_ptr() == model[0].weight.data_ptr()
    assert torch.equal(one, torch.cat([first, second]).bfloat16())
    left, right = torch.randn(5, 6).bfloat16(), torch.randn(5, 16).bfloat16()
    for _ in range(2):
        assert masters.add_product([model[0].weight, model[1].weight], left, right)
    total = torch.cat([masters.sums["0.weight"], masters.sums["1.weight"]])
    torch.testing.assert_close(total, 2 * (left.T @ right).float())
    assert not masters.add_product([torch.zeros(2, 16)], left[:, :2], right)
    assert not masters.add_product([model[0].weight], left[:, :4], right)
    masters.forget()
    model[0](right).sum().backward()
    assert not masters.add_product([model[0].weight, model[1].weight], left, right)
