"""The invariant product in Triton's interpreter, against float64 and against itself."""

import torch

from slime_core.kernels.linear import invariant_linear
from slime_core.kernels.linear_cuda import SINGLE, TILES, _run


def check():
    torch.manual_seed(0)
    for inputs, outputs in ((64, 80), (102, 48)):
        x, weight = torch.randn(70, inputs), torch.randn(outputs, inputs)
        bias = torch.randn(outputs)
        reference = x.double() @ weight.double().T
        for tile in (*TILES, SINGLE) if inputs % 4 == 0 else ():
            torch.testing.assert_close(_run(tile, x, weight, None), reference.float(), rtol=1e-5, atol=1e-5)
        whole = invariant_linear(x, weight, bias)
        torch.testing.assert_close(whole, (reference + bias.double()).float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(invariant_linear(x[3:4], weight, bias), whole[3:4])
        assert torch.equal(invariant_linear(x, (weight[:9], weight[9:]), bias), whole)
        leaves = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
        grad = torch.randn(70, outputs)
        reference = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, grad)
        for cut in (0, 9):
            weights = (weight[:cut], weight[cut:]) if cut else weight
            gradients = torch.autograd.grad(invariant_linear(x, weights, bias), leaves, grad)
            for one, other in zip(gradients, reference, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
