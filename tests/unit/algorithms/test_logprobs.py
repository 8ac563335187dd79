"""Chunked log-probs equal the plain ones, forward and backward, and never hold all logits."""

import pytest
import torch

from slime_core.algorithms.shared.logprobs import linear_log_probs, logits_log_probs

pytestmark = pytest.mark.unit


def inputs(rows, hidden, vocab, dtype=torch.float64):
    torch.manual_seed(0)
    h = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, dtype=dtype, requires_grad=True)
    return h, w, b, torch.randint(vocab, (rows,)), torch.rand(rows, dtype=dtype) + 0.5


def plain(h, w, b, target, temperature):
    logits = h @ w.T + b
    logits = logits / temperature[:, None]
    p = torch.softmax(logits, dim=1)
    return torch.log(p[torch.arange(len(h)), target]), -(p * torch.log(p)).sum(1)


@pytest.mark.parametrize("vocab", [5, 100], ids=["kept", "made_again"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunks_equal_the_plain_softmax_and_its_gradient(vocab, chunk):
    h, w, b, target, temperature = inputs(7, 6, vocab)
    got = linear_log_probs(h, w, target, bias=b, temperature=temperature, chunk=chunk)
    want = plain(h, w, b, target, temperature)
    torch.testing.assert_close(got, want)
    g1, g2 = torch.randn(7).double(), torch.randn(7).double()
    for use in ((g1, g2), (g1, 0 * g2), (0 * g1, g2)):
        ours = torch.autograd.grad((got[0] * use[0] + got[1] * use[1]).sum(), [h, w, b], retain_graph=True)
        theirs = torch.autograd.grad((want[0] * use[0] + want[1] * use[1]).sum(), [h, w, b], retain_graph=True)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", [0, 1], ids=["log_probs", "entropy"])
@pytest.mark.parametrize("vocab", [5, 100], ids=["kept", "made_again"])
def test_one_output_alone_has_its_gradient(which, vocab):
    h, w, b, target, temperature = inputs(4, 6, vocab)
    got = linear_log_probs(h, w, target, bias=b, temperature=temperature, chunk=3)[which]
    want = plain(h, w, b, target, temperature)[which]
    torch.testing.assert_close(torch.autograd.grad(got.sum(), [h, w, b]), torch.autograd.grad(want.sum(), [h, w, b]))


def test_no_rows_give_no_values_and_a_zero_gradient():
    h, w, *_ = inputs(1, 4, 9)
    got, _ = linear_log_probs(h[:0], w, torch.zeros(0, dtype=torch.int64), chunk=4)
    got.sum().backward()
    assert got.shape == (0,)
    assert (w.grad == 0).all()


def test_bfloat16_products_give_float32_values():
    h, w, _, target, _ = inputs(16, 32, 300, torch.float32)
    got, entropy = linear_log_probs(h.bfloat16(), w.bfloat16(), target, chunk=5)
    want, _ = plain(h, w, torch.zeros(300), target, torch.ones(16))
    assert (got.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(got, want, atol=0.3, rtol=0.02)


def test_no_tensor_holds_the_logits_of_all_rows():
    rows, hidden, vocab, chunk = 64, 8, 512, 16
    h, w, b, target, _ = inputs(rows, hidden, vocab, torch.float32)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(o.numel() for o in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(o))
            return out

    with Watch():
        log_probs, _ = linear_log_probs(h, w, target, bias=b, chunk=chunk)
        log_probs.sum().backward()
    assert max(sizes) == chunk * vocab


def test_logits_of_a_model_give_the_same_as_the_linear_head():
    h, w, b, target, temperature = inputs(7, 6, 11)
    got = logits_log_probs(h @ w.T + b, target, temperature=temperature)
    torch.testing.assert_close(got, plain(h, w, b, target, temperature))
    torch.testing.assert_close(
        torch.autograd.grad(got[0].sum(), w), torch.autograd.grad(plain(h, w, b, target, temperature)[0].sum(), w)
    )
