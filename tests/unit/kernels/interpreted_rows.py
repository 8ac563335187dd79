"""The Triton kernels of rows in Triton's interpreter, against float64, which runs the references."""

import torch

from slime_core.kernels import quantised as kernel_quantised, rows_cuda, steps as kernel_steps
from slime_core.kernels.gated import gated
from slime_core.kernels.norm import add_rms_norm, rms_norm
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.kernels.rotary import rotate
from slime_core.kernels.steps import ADVANCE, POSITION, TEMPERATURE, TOP_P


def compare(function, *shapes):
    """Results and gradients of draws of these shapes."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    outs, references = ([x] if isinstance(x, torch.Tensor) else x for x in (function(*inputs), function(*wide)))
    grads = [torch.randn_like(x) for x in outs]
    gradients = torch.autograd.grad(outs, inputs, grads)
    reference_gradients = torch.autograd.grad(references, wide, [x.double() for x in grads])
    for one, other in zip((*outs, *gradients), (*references, *reference_gradients), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=2e-6, atol=2e-6)


def norms():
    for width, offset in ((48, 0.0), (9, 1.0)):
        compare(lambda x, weight, offset=offset: rms_norm(x, weight, 1e-6, offset), (2, 5, width), (width,))
        compare(lambda *xs, offset=offset: add_rms_norm(*xs, 1e-6, offset), (5, width), (5, width), (width,))


def many_rows():
    """More tiles than programs: each sums several."""
    rows_cuda.PROGRAMS, rows_cuda.BACKWARD_TILE = 2, 16
    compare(lambda x, weight: rms_norm(x, weight, 1e-6), (19, 8), (8,))


def rotary():
    for dim, turned in ((8, 8), (12, 4)):
        cos, sin = torch.randn(2, 3, turned)
        compare(lambda qkv, cos=cos, sin=sin: rotate(qkv[:, :3], qkv[:, 3:5], cos, sin), (3, 6, dim))


def gates():
    for activation in ("silu", "gelu_tanh"):
        compare(lambda both, activation=activation: gated(both, activation), (3, 18))


def steps():
    """Tables wider than a program copies at once; the second sequence stands for none."""
    state, tables = torch.randint(0, 1 << 40, (7, 5)), torch.randint(0, 9999, (5, 300), dtype=torch.int32)
    state[POSITION] = torch.tensor([0, 17, 31, 299 * 16, 4])
    state[ADVANCE] = torch.tensor([1, 0, 1, 1, 1])
    state[TEMPERATURE : TOP_P + 1] = torch.rand(2, 5).view(torch.int32)
    index, draws = torch.tensor([3, 1, 0]), torch.tensor([8, 7, 1 << 17])
    numbers = torch.tensor([[-0.5, float("nan"), -2.0], [-1.0, -3.0, float("nan")]])
    outs = []
    for by_triton in (True, False):
        kernel_steps.by_triton = lambda tensor, by_triton=by_triton: by_triton
        own = state.clone()
        rows = kernel_steps.read_rows(own, tables, index, 16)
        outs.append([*rows, kernel_steps.move_on(own, index, rows, draws, *numbers), own])
    assert all(torch.equal(one, other) for one, other in zip(*map(_bits, outs), strict=True))
    assert outs[0][-1][POSITION].tolist() == [1, 17, 31, 299 * 16 + 1, 4]


def quantised():
    """Numbers that end within a tile; the interpreter rounds to bfloat16 in another way."""
    for form in ("nf4", "fp8"):
        weight = QuantisedWeight.of(torch.randn(3, 11, 128), form, torch.float32)
        outs = []
        for by_triton in (True, False):
            kernel_quantised.by_triton = lambda tensor, by_triton=by_triton: by_triton
            outs.append(weight.dense())
        assert torch.equal(*outs)


def _bits(tensors):
    return [tensor.view(torch.int32) if tensor.is_floating_point() else tensor for tensor in tensors]


def check():
    torch.manual_seed(0)
    for part in (norms, rotary, gates, many_rows, steps, quantised):
        part()
