"""The gated delta rule in chunks against its recurrence, token by token in float64; sequences of a pack keep apart."""

import pytest
import torch

from slime_megatron.delta_rule import CHUNK, EPSILON, causal_convolution, gated_delta_rule

pytestmark = pytest.mark.unit

LENGTHS = (5, CHUNK, 2 * CHUNK + 7, 1)


def rows(lengths=LENGTHS, heads=2, width=4, value=3):
    """q, k, v, fading and strength, of which each number matters."""
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, size) for size in (width, width, value))
    fading, strength = -torch.rand(total, heads) * 0.2, torch.rand(total, heads)
    return [x.requires_grad_() for x in (q, k, v, fading, strength)]


def recurrence(q, k, v, fading, strength, lengths):
    """S <- a (I - b k k') S + b k v', o = S' q, as the paper's equation 10 has it."""
    q, k, v, fading, strength = (x.double() for x in (q, k, v, fading, strength))
    q, k = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k))
    out, first = [], 0
    for length in lengths:
        state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=torch.float64)
        for t in range(first, first + length):
            key, strong = k[t][..., None], strength[t][:, None, None]
            state = fading[t].exp()[:, None, None] * (state - strong * key @ (key.transpose(1, 2) @ state))
            state = state + strong * key @ v[t][:, None]
            out.append((q[t][:, None] @ state)[:, 0] / q.shape[2] ** 0.5)
        first += length
    return torch.stack(out)


def test_chunks_give_values_and_gradients_of_the_recurrence():
    one, other = rows(), rows()
    found, wanted = gated_delta_rule(*one, LENGTHS), recurrence(*other, LENGTHS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_one_key_that_is_written_twice_holds_the_second_value():
    """Strength 1 replaces what the key held; without fading the state is the last value, and a query of the key reads
    it over the root of the width."""
    k = torch.tensor([[[0.0, 3.0, 0.0, 0.0]]]).expand(2, 1, 4)
    v = torch.tensor([[[8.0]], [[6.0]]])
    out = gated_delta_rule(k, k, v, torch.zeros(2, 1), torch.ones(2, 1), [2])
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([4.0, 3.0]))


def test_a_convolution_sees_nothing_before_its_sequence():
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    weight = torch.tensor([[[100.0, 10.0, 1.0]], [[0.0, 0.0, 1.0]]])
    out = causal_convolution(x, weight, [3, 1])
    assert out.tolist() == [[1.0, 10.0], [12.0, 20.0], [123.0, 30.0], [4.0, 40.0]]
