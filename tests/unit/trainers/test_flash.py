"""What both backends hand to torch's varlen flash call: heads, widths, scale and window as it wants them.

The kernel is a GPU's. In its place stands plain softmax attention that refuses what the kernel refuses.
"""

import math

import numpy as np
import pytest
import torch

from slime_core.trainers.flash import FLASH, varlen
from slime_core.trainers.fsdp.attention import SharedRows, _varlen

pytestmark = pytest.mark.unit

ENDS_Q, ENDS_K = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])


def plain(q, k, v, scale, window):
    """Softmax attention of one span, row by row: q [n, heads, d], k and v [m, heads or fewer, ...], ends aligned."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[-1])
    for row in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // k.shape[1])
            products = scale * (k[first : last + 1, of] @ q[row, head])
            out[row, head] = products.softmax(0) @ v[first : last + 1, of]
    return out


def by_span(q, k, v, ends_q, ends_k, scale, window):
    spans = zip(ends_q.tolist(), ends_q[1:].tolist(), ends_k.tolist(), ends_k[1:].tolist(), strict=False)
    return torch.cat([plain(q[a:b], k[c:d], v[c:d], scale, window) for a, b, c, d in spans])


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    def stand_in(
        q, k, v, cu_q, cu_k, most_q, most_k, dropout, causal, _mask, *, scale, window_size_left, window_size_right
    ):
        assert k.shape[1:] == v.shape[1:]
        assert (q.shape[1] % k.shape[1], q.shape[-1]) == (0, k.shape[-1])
        assert q.shape[-1] % 8 == 0
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert (most_q, most_k) == (cu_q.diff().max(), cu_k.diff().max())
        assert (dropout, window_size_right, causal) == (0.0, 0, window_size_left == -1)
        out = by_span(q, k, v, cu_q, cu_k, scale, None if causal else window_size_left + 1)
        return out, torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0)

    monkeypatch.setattr(FLASH, "forward", stand_in)


@pytest.mark.parametrize("window", [None, 2], ids=["all", "window"])
@pytest.mark.parametrize("scale", [None, 0.3], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("heads", "width", "width_v"), [(4, 8, 8), (2, 8, 8), (1, 6, 6), (2, 12, 8), (4, 5, 9)],
    ids=["as-it-is", "grouped", "narrow", "latent", "odd"],
)  # fmt: skip
def test_flash_attention_is_attention_of_each_span(heads, width, width_v, scale, window):
    draw = torch.Generator().manual_seed(width)
    q = torch.randn(4, 5, width, generator=draw).transpose(0, 1)
    k, v = (torch.randn(7, heads, size, generator=draw) for size in (width, width_v))
    out = varlen(q, k, v, ENDS_Q, ENDS_K, 3, 4, scale=scale, window=window)
    expected = by_span(q, k, v, ENDS_Q, ENDS_K, scale or 1 / math.sqrt(width), window)
    torch.testing.assert_close(out, expected)


class Shared:
    """Two sequences of 4 and 3 rows whose first two rows are one prompt, that the pack has once."""

    cu_seqlens, longest = torch.tensor([0, 4, 7]), 4
    shared = SharedRows.of(np.array([0, 1, 2, 3, 0, 1, 4]), 5, "cpu")


def test_a_shared_prompt_is_read_by_each_of_its_sequences():
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, 2, 8, generator=draw) for _ in range(3))
    out = _varlen(q, k, v, Shared(), 0.5, None)
    first = plain(q[:4], k[:4], v[:4], 0.5, None)
    rows = torch.tensor([0, 1, 4])
    second = plain(q[rows], k[rows], v[rows], 0.5, None)
    torch.testing.assert_close(out, torch.cat([first, second[2:]]))


@pytest.mark.parametrize(
    "flat",
    [[0, 1, 2, 0, 1, 3], [0, 0, 0, 1], [2, 1, 0, 1, 2, 3, 1], [0, 1, 2]],
    ids=["prefix", "thrice", "mixed", "alone"],
)
def test_rows_in_several_places_are_read_from_each_and_get_all_gradients(flat):
    count, rows = max(flat) + 1, torch.tensor(flat)
    shared = SharedRows.of(np.array(flat), count, "cpu")
    x, grad = torch.randn(count, 3, dtype=torch.float64), torch.randn(len(flat), 3, dtype=torch.float64)
    assert torch.equal(shared.spread(x), x[rows])
    wanted = torch.zeros_like(x).index_add_(0, rows, grad)
    torch.testing.assert_close(shared.spread_backward(grad), wanted, rtol=1e-6, atol=1e-6)
    y, back = torch.randn(len(flat), 3, requires_grad=True), torch.randn(count, 3)
    picked = y[shared.last]
    assert torch.equal(shared.pick(y), picked)
    assert torch.equal(rows[shared.last], torch.arange(count))
    torch.testing.assert_close(shared.pick_backward(back), torch.autograd.grad(picked, y, back)[0])
