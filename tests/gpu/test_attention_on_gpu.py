"""Attention within packs on a GPU, by either of its kernels, beside float64 on the same numbers."""

import itertools

import numpy as np
import pytest
import torch

from slime_core.trainers.fsdp.attention import PackSegments, segment_attention

pytestmark = pytest.mark.gpu
HEADS, GROUPS, WIDTH = 4, 2, 128
CASES = {  # lengths of segments, and which segment each continues
    "one": ([2048], [-1]),
    "long": ([2048, 1500, 1031], [-1, -1, -1]),
    "shared prompt": ([1200, 700, 900], [-1, 0, 0]),
    "short": ([100, 31, 7], [-1, -1, -1]),
}


def exact(q, k, v, segments):
    """The same in float64, sequence by sequence, from rows as the pack has them."""
    bounds, gather = segments.cu_seqlens.tolist(), segments.gather
    rows = gather if gather is not None else torch.arange(q.shape[2], device=q.device)
    out = torch.zeros(q.shape[2], HEADS, WIDTH, dtype=torch.float64, device=q.device)
    for first, last in itertools.pairwise(bounds):
        mine = rows[first:last]
        a, b, c = (x[0, :, mine].double() for x in (q, k, v))
        b, c = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (b, c))
        mask = torch.ones(len(mine), len(mine), dtype=torch.bool, device=q.device).triu(1)
        scores = (a @ b.transpose(1, 2) / WIDTH**0.5).masked_fill(mask, -torch.inf)
        out = out.index_put((mine,), (scores.softmax(-1) @ c).transpose(0, 1))
    return out[None]


@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradients_are_those_of_float64(case):
    lengths, prefix = CASES[case]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    segments = PackSegments.of(cu, np.array(prefix), "cuda")
    assert segments.long == (case != "short")
    torch.manual_seed(0)
    total, grads = int(cu[-1]), []
    q, k, v = (torch.randn(1, n, total, WIDTH, device="cuda", dtype=torch.bfloat16) for n in (HEADS, GROUPS, GROUPS))
    back = torch.randn(1, total, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for function in (lambda *x: segment_attention(torch.nn.Identity(), *x, None, segments=segments)[0], exact):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*given) if function is not exact else exact(*given, segments)
        out.backward(back.to(out.dtype))
        grads.append([out.detach().double(), *(x.grad.double() for x in given)])
    for mine, wanted in zip(*grads):
        assert float((mine - wanted).abs().max() / wanted.abs().max()) < 2e-2
