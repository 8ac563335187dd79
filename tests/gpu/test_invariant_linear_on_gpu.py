"""On a GPU, the invariant product: near float64, and an output's bits depend on its row and its column alone."""

import pytest
import torch

from slime_core.kernels.linear import invariant_linear

pytestmark = pytest.mark.gpu

SHAPES = [(576, 960), (1536, 576), (576, 3072), (2560, 6144), (9728, 2560), (102, 49)]


def _draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).cuda()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_and_gradients(inputs, outputs, dtype):
    leaves = [_draw(*shape, dtype=dtype).requires_grad_() for shape in ((300, inputs), (outputs, inputs), (outputs,))]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, reference = invariant_linear(*leaves), torch.nn.functional.linear(*wide)
    grad = _draw(300, outputs, dtype=dtype)
    pairs = [(out, reference)]
    pairs += zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(reference, wide, grad.double()))
    bound = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]  # gradients may be in TF32
    for one, other in ((x.detach().double(), y.detach()) for x, y in pairs):
        assert float((one - other).abs().max()) < bound * float(other.abs().max())


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_bits_of_an_output_are_its_own(inputs, outputs):
    x, weight, bias = _draw(20_000, inputs), _draw(outputs, inputs), _draw(outputs)
    whole = invariant_linear(x, weight, bias)
    for rows in (1, 3, 16, 64, 65, 200, 256, 1000, 4096):
        begin = 20_000 - rows
        assert torch.equal(invariant_linear(x[begin:], weight, bias), whole[begin:]), rows
    half = outputs // 2
    assert torch.equal(invariant_linear(x[:77], weight[half:], bias[half:]), whole[:77, half:])
