"""The gradient within the forward pass is that of the log-probs route and of plain autograd; memory stays in blocks."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared import logprobs
from slime_core.algorithms.shared.logprobs import linear_log_probs, linear_loss

pytestmark = pytest.mark.unit


def inputs(rows, hidden=6, vocab=11, seed=0, dtype=torch.float64):
    """Hidden states, matrix, bias, targets, temperatures, advantages and weights, some of them 0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    leaves = [normal(rows, hidden), normal(vocab, hidden), normal(vocab)]
    target = torch.randint(vocab, (rows,), generator=draw)
    weight = torch.rand(rows, generator=draw, dtype=dtype) * (torch.rand(rows, generator=draw) > 0.2)
    return [x.requires_grad_() for x in leaves], target, torch.rand(rows, generator=draw) + 0.5, normal(rows), weight


def token_loss(log_probs, entropy, advantages, entropy_coef):
    """Curved in the log-prob, so that its slope differs between tokens."""
    return (log_probs / 3).exp() * advantages + log_probs**2 / 7 - entropy_coef * entropy**2


def plain(leaves, target, temperature, advantages, weight, entropy_coef):
    h, w, b = leaves
    table = torch.log_softmax((h @ w.T + (b if b is not None else 0)) / temperature[:, None], 1)
    entropy = -(table.exp() * table).sum(1)
    return (token_loss(table.gather(1, target[:, None])[:, 0], entropy, advantages, entropy_coef) * weight).sum()


def first(leaves, target, temperature, advantages, weight, entropy_coef, chunk=0):
    h, w, b = leaves
    log_probs, entropy = linear_log_probs(h, w, target, bias=b, temperature=temperature, chunk=chunk)
    return (token_loss(log_probs, entropy, advantages, entropy_coef) * weight).sum()


def within(leaves, target, temperature, advantages, weight, entropy_coef, chunk=0):
    h, w, b = leaves

    def loss(part, log_probs, entropy):
        return (token_loss(log_probs, entropy, advantages[part], entropy_coef) * weight[part]).sum()

    return linear_loss(h, w, target, loss, bias=b, temperature=temperature, chunk=chunk)


def gradients(total, leaves):
    return torch.autograd.grad(3 * total, [leaf for leaf in leaves if leaf is not None])


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    rows=st.integers(1, 9), vocab=st.integers(2, 40), chunk=st.integers(0, 4), part=st.integers(1, 400),
    bias=st.booleans(), warm=st.booleans(), entropy=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_both_routes_equal_plain_autograd_in_float64(rows, vocab, chunk, part, bias, warm, entropy, seed):
    leaves, target, temperature, *rest = inputs(rows, vocab=vocab, seed=seed)
    leaves = leaves if bias else [*leaves[:2], None]
    temperature = temperature if warm else torch.ones(rows)
    want = plain(leaves, target, temperature, *rest, entropy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.EXACT, "cpu", part)
        patch.setitem(logprobs.LOGITS, "cpu", part * 3)
        for route in (first, within):
            got = route(leaves, target, temperature if warm else None, *rest, entropy, chunk)
            assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-10, abs=1e-12)
            for mine, theirs in zip(
                gradients(got, leaves),
                torch.autograd.grad(3 * want, [x for x in leaves if x is not None], retain_graph=True),
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("route", [first, within])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rounding_is_that_of_the_dtype(route, dtype, bound):
    leaves, target, temperature, advantages, weight = inputs(40, hidden=32, vocab=300, dtype=torch.float32)
    half = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in half]
    got = route(half, target, temperature, advantages, weight, 0.1, 7)
    want = plain(exact, target, temperature.double(), advantages.double(), weight.double(), 0.1)
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=bound)
    for mine, theirs in zip(gradients(got, half), gradients(want, exact)):
        assert mine.dtype == dtype
        assert error(mine, theirs) < bound


@pytest.mark.parametrize("route", [first, within])
def test_many_blocks_in_bfloat16_add_up_in_float32(route):
    leaves, *rest = inputs(512, hidden=16, vocab=24, dtype=torch.float32)
    half = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    one, many = (gradients(route(half, *rest, 0.0, chunk), half)[1] for chunk in (0, 2))
    assert error(many, one) < 4e-3  # one rounding to bfloat16; 256 of them would be 10 times that


@pytest.mark.parametrize("route", [first, within])
def test_no_rows_give_loss_0_and_gradients_of_0(route):
    leaves, target, temperature, advantages, weight = inputs(0)
    total = route(leaves, target, temperature, advantages, weight, 0.1)
    assert float(total.detach()) == 0
    assert all((grad == 0).all() for grad in gradients(total, leaves))


def test_a_matrix_that_does_not_learn_gets_no_gradient():
    leaves, *rest = inputs(5)
    leaves[1].requires_grad_(False)
    within(leaves, *rest, 0.1).backward()
    want, bias = torch.autograd.grad(plain(leaves, *rest, 0.1), [leaves[0], leaves[2]])
    torch.testing.assert_close(leaves[0].grad, want)
    torch.testing.assert_close(leaves[2].grad, bias)
    assert leaves[1].grad is None


def test_the_gradient_is_handed_over_once():
    leaves, *rest = inputs(3)
    total = within(leaves, *rest, 0.0)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        total.backward()


def test_a_tied_matrix_gets_both_gradients():
    (_, w, b), target, temperature, advantages, weight = inputs(7)
    ids = torch.arange(7)
    found = [
        torch.autograd.grad(route([w[ids] * 2, w, b], target, temperature, advantages, weight, 0.1), w)[0]
        for route in (plain, first, within)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("route", [first, within])
def test_no_float32_array_is_larger_than_its_share_and_no_block_than_its_own(route, monkeypatch):
    rows, hidden, vocab = 64, 4, 512
    monkeypatch.setitem(logprobs.LOGITS, "cpu", 16 * vocab * 2)
    monkeypatch.setitem(logprobs.EXACT, "cpu", 2 * vocab * 4)
    leaves, *rest = inputs(rows, hidden, vocab, dtype=torch.float32)
    half = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    sizes = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple) else (out,):
                if torch.is_tensor(one):
                    sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.numel())
            return out

    with Watch():
        route(half, *rest, 0.1).backward()
    assert sizes[torch.float32] == max(2 * vocab, hidden * vocab)
    assert sizes[torch.bfloat16] == 16 * vocab


def test_logits_beyond_any_float32_exponential_stay_finite():
    w = torch.tensor([[400.0], [-400.0], [0.0]], requires_grad=True)
    h = torch.ones(2, 1, requires_grad=True)
    target = torch.tensor([0, 1])
    total = linear_loss(h, w, target, lambda part, log_probs, entropy: (log_probs + entropy).sum())
    total.backward()
    assert float(total.detach()) == -800
    assert torch.isfinite(w.grad).all()
    assert w.grad[:, 0].tolist() == [-1, 1, 0]
