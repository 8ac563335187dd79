"""On a GPU, the kernels of rows against their references, and that a row's bits are its own."""

import pytest
import torch

from slime_core.kernels.gated import gated
from slime_core.kernels.norm import add_rms_norm, rms_norm
from slime_core.kernels.rotary import rotate

pytestmark = pytest.mark.gpu

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]


def _draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).cuda()


def _compare(function, inputs, bound):
    """A function on the GPU against itself in float64 on the CPU: results and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
    outs, references = function(*inputs), function(*wide)
    outs, references = ((x,) if isinstance(x, torch.Tensor) else x for x in (outs, references))
    grads = [_draw(*x.shape, dtype=x.dtype) for x in outs]
    gradients = torch.autograd.grad(outs, inputs, grads)
    reference_gradients = torch.autograd.grad(references, wide, [x.double().cpu() for x in grads])
    for one, other in zip((*outs, *gradients), (*references, *reference_gradients), strict=True):
        one, other = one.detach().double().cpu(), other.detach().double()
        bound_here = bound * max(float(other.abs().max()), 1.0)
        torch.testing.assert_close(one, other, rtol=bound, atol=bound_here)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 576, 2560, 5120])
def test_norms(width, dtype, bound):
    x, residual, weight = *_draw(2, 777, width, dtype=dtype), _draw(width, dtype=dtype)
    for offset in (0.0, 1.0):
        _compare(lambda x, weight, offset=offset: rms_norm(x, weight, 1e-6, offset), (x, weight), bound)
        _compare(lambda *xs, offset=offset: add_rms_norm(*xs, 1e-6, offset), (x, residual, weight), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(9, 3, 64, 64), (32, 8, 128, 128), (4, 2, 80, 32)])
def test_rotation(heads, kv_heads, dim, turned, dtype, bound):
    angles = _draw(99, turned // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    joined = _draw(99, heads + 2 * kv_heads, dim, dtype=dtype)

    def both(qkv):
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        return rotate(q, k, cos.to(qkv.device), sin.to(qkv.device))

    _compare(both, (joined,), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(activation, dtype, bound):
    _compare(lambda x: gated(x, activation), (_draw(99, 2 * 1536, dtype=dtype),), bound)


@pytest.mark.parametrize("width", [64, 576, 2560])
def test_the_bits_of_a_row_are_its_own(width):
    x, residual, weight = *_draw(2, 1000, width, dtype=torch.bfloat16), _draw(width, dtype=torch.bfloat16)
    whole = add_rms_norm(x, residual, weight, 1e-6)
    for rows in (slice(0, 1), slice(3, 4), slice(17, 300), slice(999, 1000)):
        part = add_rms_norm(x[rows], residual[rows], weight, 1e-6)
        assert all(torch.equal(one, other[rows]) for one, other in zip(part, whole))


def test_the_gradient_of_a_norm_weight_repeats_bit_for_bit():
    x, grad, weight = *_draw(2, 25_000, 576, dtype=torch.bfloat16), _draw(576, dtype=torch.bfloat16).requires_grad_()
    first, second = (torch.autograd.grad(rms_norm(x, weight, 1e-6), weight, grad)[0] for _ in range(2))
    assert torch.equal(first, second)
