"""Weights in 4 and 8 bits: bitsandbytes' numbers, gradients in float64, what autograd keeps, and shards of ranks."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slime_core.kernels.linear import joined
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.trainers.fsdp.shards import full, local, reshard, shard_modules
from slime_core.trainers.process_group import join_group
from slime_core.weights.fp8 import BlockFormat

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_has_the_numbers_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[3, :64] = 0
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    state.dtype = dtype
    quantised = QuantisedWeight.of(weight, "nf4", dtype)
    assert torch.equal(quantised.numbers.flatten(), packed.flatten())
    assert torch.equal(quantised.scales.flatten(), state.absmax)
    assert torch.equal(quantised.dense(), functional.dequantize_4bit(packed, state))
    assert quantised.stored_bytes == weight.numel() * 9 // 16


def test_scales_of_weights_in_bfloat16_take_two_bytes_and_lose_nothing():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(96, 192, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    weight[3, :64] = 0
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    quantised = QuantisedWeight.of(weight, "nf4", torch.bfloat16)
    assert torch.equal(quantised.numbers.flatten(), packed.flatten())
    assert (quantised.scales.dtype, quantised.stored_bytes) == (torch.bfloat16, weight.numel() * 17 // 32)
    assert torch.equal(quantised.dense(), functional.dequantize_4bit(packed, state))
    stored = QuantisedWeight.of_packed(quantised.numbers, state.absmax.view(96, 3), torch.bfloat16)
    assert (stored.scales.dtype, torch.equal(stored.dense(), quantised.dense())) == (torch.bfloat16, True)
    odd = QuantisedWeight.of_packed(quantised.numbers, state.absmax.view(96, 3) * 1.001, torch.bfloat16)
    assert odd.scales.dtype == torch.float32


def test_fp8_has_the_numbers_of_its_blocks():
    weight, form = torch.randn(3, 200, 256, generator=torch.Generator().manual_seed(0)), BlockFormat()
    expected = [
        form.dequantise(form.quantise(one, form.scales(one)), form.scales(one), torch.bfloat16) for one in weight
    ]
    assert torch.equal(QuantisedWeight.of(weight, "fp8", torch.bfloat16).dense(), torch.stack(expected))


def products(weight, x, bias):
    """What layers do with a weight [out, in]."""
    linear = nn.functional.linear(x, weight, bias)
    return linear, x @ weight.T, torch.addmm(bias, x, weight.t())


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_products_and_gradients_are_those_of_the_floats_and_no_float_is_kept(form):
    torch.manual_seed(0)
    weight = nn.Parameter(QuantisedWeight.of(torch.randn(48, 128), form, torch.float32), requires_grad=False)
    x, bias = torch.randn(7, 128, requires_grad=True), torch.randn(48)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        results = products(weight, x, bias)
    assert {type(one) for one in kept} == {QuantisedWeight}
    wide = x.detach().double().requires_grad_()
    references = products(weight.double(), wide, bias.double())
    grads = [torch.randn_like(one) for one in results]
    gradient = torch.autograd.grad(results, x, grads)[0]
    reference = torch.autograd.grad(references, wide, [grad.double() for grad in grads])[0]
    for one, other in zip((*results, gradient), (*references, reference), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-4)


def test_parts_copies_and_refused_changes():
    weight = QuantisedWeight.of(torch.randn(6, 4, 128), "nf4", torch.bfloat16)
    values = weight.dense()
    for one, other in (
        (weight[2:5], values[2:5]),
        (weight[1].T, values[1].T),
        (weight.transpose(-2, -1), values.transpose(1, 2)),
        (weight.transpose(0, 1), values.transpose(0, 1)),
        (weight.split(4)[1], values[4:]),
        (weight.clone(), values),
        (weight.float(), values.float()),
        (weight.view(-1), values.view(-1)),
    ):
        assert torch.equal(one.dense() if isinstance(one, QuantisedWeight) else one, other)
        assert one.shape == other.shape
    assert torch.equal(joined((weight[0], weight[1])), torch.cat((values[0], values[1])))
    with pytest.raises(TypeError, match=r"mul_.*quantised"):
        weight.mul_(2)
    with pytest.raises(TypeError, match=r"copy_.*quantised"):
        weight.copy_(values)


class Layer(nn.Module):
    """A frozen linear layer of a number of rows that two ranks do not share evenly, before one that learns."""

    def __init__(self, form):
        super().__init__()
        self.frozen, self.learns = nn.Linear(128, 33, bias=False), nn.Linear(33, 128)
        self.experts = nn.Parameter(
            QuantisedWeight.of(torch.randn(3, 8, 128), form, torch.float32), requires_grad=False
        )
        quantised = QuantisedWeight.of(self.frozen.weight, form, torch.float32)
        self.frozen.weight = nn.Parameter(quantised, requires_grad=False)

    def forward(self, x):
        return self.learns(self.frozen(x)) + (x @ self.experts[1].T).sum()


def train_layers(folder, rank, world):
    """A pass over two ranks' shards against one over the whole model."""
    from torch.distributed.device_mesh import init_device_mesh

    join_group(rank, world, "cpu", folder / "meet")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for form in ("nf4", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(form), Layer(form))
        x, whole = torch.randn(4, 128), model[0].frozen.weight.dense()
        expected = model(x)
        expected.square().sum().backward()
        gradient = model[0].learns.weight.grad
        model.zero_grad()
        shard_modules([*model, model], mesh, torch.float32)
        for _ in range(2):  # gathered memory is used again
            out = model(x)
            assert torch.equal(out, expected)
        (out.square().sum() / world).backward()
        assert torch.allclose(full(model[0].learns.weight.grad), gradient, rtol=1e-6)
        reshard(model)
        shard = local(model[0].frozen.weight)
        assert isinstance(shard, QuantisedWeight)
        assert len(shard.numbers) == (17, 16)[rank]
        assert torch.equal(full(model[0].frozen.weight.detach()), whole)


@pytest.mark.integration
def test_ranks_share_the_rows_and_compute_the_same(zygote, tmp_path):
    zygote.together(tmp_path, [[__file__, tmp_path, rank, 2] for rank in range(2)])


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    train_layers(Path(folder), *map(int, numbers))
