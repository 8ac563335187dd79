"""On a GPU, the loss over a linear head: both routes against float64, and how much memory they take."""

import pytest
import torch

from slime_core.algorithms.shared.logprobs import gradient_, linear_log_probs, linear_loss, softmax

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN = 5003, 96


def _made(dtype, rows=70):
    draws = torch.Generator("cpu").manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=draws)
    weight = torch.randn(VOCAB, HIDDEN, generator=draws) / 4
    target = torch.randint(0, VOCAB, (rows,), generator=draws)
    temperature = torch.rand(rows, generator=draws) + 0.5
    advantage = torch.randn(rows, generator=draws)
    made = hidden.to(dtype), weight.to(dtype), target, temperature, advantage
    return [one.cuda() for one in made]


def _wanted(hidden, weight, target, temperature, advantage):
    """The loss and its gradients in float64, with every logit."""
    h, w = (x.double().detach().requires_grad_() for x in (hidden, weight))
    logs = torch.log_softmax(h @ w.T / temperature.double()[:, None], 1)
    chosen = logs.gather(1, target[:, None])[:, 0]
    entropy = -(logs.exp() * logs).sum(1)
    loss = -(advantage.double() * chosen + 0.1 * entropy).sum()
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("route", ["within the forward", "second pass"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_loss_and_gradients_are_those_of_float64(route, dtype, bound):
    hidden, weight, target, temperature, advantage = _made(dtype)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def loss(part, log_probs, entropy):
        return -(advantage[part] * log_probs + 0.1 * entropy).sum()

    if route == "second pass":
        total = loss(slice(None), *linear_log_probs(h, w, target, temperature=temperature, chunk=32))
    else:
        total = linear_loss(h, w, target, loss, temperature=temperature, chunk=32)
    total.backward()
    for found, want in zip((total.detach(), h.grad, w.grad), _wanted(hidden, weight, target, temperature, advantage)):
        scale = max(float(want.abs().max()), 1e-6)
        assert float((found.double() - want).abs().max()) / scale < bound


def test_kernels_are_the_plain_softmax_and_its_gradient():
    draws = torch.Generator("cpu").manual_seed(1)
    logits, target = torch.randn(9, VOCAB, generator=draws) * 4, torch.randint(0, VOCAB, (9,), generator=draws)
    inverse, slopes = torch.rand(9, generator=draws) + 0.5, torch.randn(2, 9, generator=draws)
    for some in (None, inverse):
        plain = softmax(logits, target, some)
        made = softmax(logits.cuda(), target.cuda(), None if some is None else some.cuda())
        torch.testing.assert_close(list(map(torch.Tensor.cpu, made)), list(plain), rtol=2e-6, atol=2e-5)
        for d_log_probs, d_entropy in ((slopes[0], None), (slopes[0], slopes[1]), (None, slopes[1])):
            want, found = logits.clone(), logits.cuda()
            gradient_(want, target, some, plain, d_log_probs, d_entropy)
            moved = [None if one is None else one.cuda() for one in (some, d_log_probs, d_entropy)]
            gradient_(found, target.cuda(), moved[0], made, *moved[1:])
            torch.testing.assert_close(found.cpu(), want, rtol=2e-5, atol=2e-6)


def test_the_peak_is_below_one_gibibyte_at_a_vocabulary_of_151936():
    rows, vocab, hidden_size = 8192, 151_936, 256
    hidden = torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_loss(hidden, weight, target, lambda part, log_probs, entropy: -log_probs.sum()).backward()
    gradients = (
        3 * vocab * hidden_size * 2 + rows * hidden_size * 2
    )  # of the weight in float32 and bfloat16, of hidden
    assert torch.cuda.max_memory_allocated() - before - gradients < 1 << 30
