"""Attention over segments against each sequence alone, forward and backward; how sequences are put together."""

import itertools
import math

import numpy as np
import pytest
import torch

from slime_core.trainers.fsdp import attention
from slime_core.trainers.fsdp.attention import Attention, PackSegments, segment_attention

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, DIM = 4, 2, 8
PACKS = {
    "equal": ([5, 5, 5], [-1, -1, -1]),
    "near": ([9, 8, 8, 8], [-1] * 4),
    "far": ([30, 4, 1], [-1] * 3),
    "long": ([150, 149, 7], [-1] * 3),
    "shared": ([4, 3, 6, 5, 2], [-1, -1, 0, 0, 1]),
    "shared_long": ([20, 140, 135, 9], [-1, 0, 0, -1]),
    "one": ([1], [-1]),
}


def tensors(total):
    torch.manual_seed(0)
    return [torch.randn(total, h, DIM, dtype=torch.float64, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)]


def sequences(lengths, prefix):
    """Rows of each sequence, and whether its output counts for the prefix too."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for i, before in enumerate(prefix):
        if i in prefix:
            continue
        head = range(bounds[before], bounds[before + 1]) if before >= 0 else range(0)
        yield [*head, *range(bounds[i], bounds[i + 1])]


def plain(q, k, v, lengths, prefix, window=None, softcap=None, sinks=None):
    """Each sequence alone, a head at a time."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    for rows in sequences(lengths, prefix):
        n = len(rows)
        hidden = torch.ones(n, n).triu(1).bool()
        if window is not None:
            hidden |= torch.ones(n, n).tril(-window).bool()
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            scores = q[rows, head] @ k[rows, kv].T / math.sqrt(DIM)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(hidden, -math.inf).exp()
            total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
            out = out.index_put((torch.tensor(rows), torch.tensor(head)), weights / total @ v[rows, kv])
    return out


@pytest.mark.parametrize("window", [None, 3], ids=["full", "window"])
@pytest.mark.parametrize("name", PACKS)
def test_attention_of_a_pack_is_that_of_its_sequences_alone(name, window):
    lengths, prefix = PACKS[name]
    q, k, v = tensors(sum(lengths))
    segments = PackSegments.of(np.concatenate([[0], np.cumsum(lengths)]), prefix, "cpu")
    by_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    got, _ = segment_attention(
        torch.nn.Module(), *by_heads, None, segments=segments, scaling=DIM**-0.5, sliding_window=window
    )
    want = plain(q, k, v, lengths, prefix, window)
    torch.testing.assert_close(got[0], want)
    d_out = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(out, [q, k, v], d_out) for out in (got[0], want))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", PACKS)
def test_attention_with_its_own_backward_pass_is_the_same(name):
    lengths, prefix = PACKS[name]
    q, k, v = tensors(sum(lengths))
    want = plain(q, k, v, lengths, prefix)
    d_out = torch.randn_like(want)
    theirs = torch.autograd.grad(want, [q, k, v], d_out)
    got, ours = torch.zeros_like(q), [torch.zeros_like(x) for x in (q, k, v)]
    for run in PackSegments.of(np.concatenate([[0], np.cumsum(lengths)]), prefix, "cpu").runs:
        one = Attention(run, DIM**-0.5)
        with torch.no_grad():
            filled = [run.fill(x.detach()).transpose(1, 2).contiguous() for x in (q, k, v)]
            run.put(one.forward(*filled, True).transpose(1, 2), got)
        for out, grad in zip(ours, one.backward(run.fill_gradient(d_out).transpose(1, 2)), strict=True):
            run.add(grad.transpose(1, 2), out)
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(tuple(ours), theirs)


def test_neighbours_of_about_the_same_length_attend_in_one_call():
    runs = PackSegments.of([0, 10, 20, 29, 32], [-1] * 4, "cpu").runs
    assert [(run.count, run.length) for run in runs] == [(3, 10), (1, 3)]
    assert [run.gather is None for run in runs] == [False, True]


@pytest.mark.parametrize(
    ("lengths", "prefix", "wanted"),
    [([1024], [-1], True), ([1023], [-1], False), ([2000, 48], [-1, -1], True), ([1000, 100, 100], [-1, 0, 0], True)],
)
def test_the_mean_length_of_sequences_says_which_kernel_takes_them(lengths, prefix, wanted):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    assert PackSegments.of(cu, np.array(prefix), "cpu").long is wanted


@pytest.mark.parametrize("name", PACKS)
def test_sequences_that_are_filled_up_to_a_planned_length_attend_as_they_are(name, monkeypatch):
    """On a GPU long ones are, to one of 16 lengths between powers of two."""
    monkeypatch.setattr(attention, "LONG", 1)
    lengths, prefix = PACKS[name]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    rows, seen = list(map(np.asarray, sequences(lengths, prefix))), np.zeros(int(cu[-1]), dtype=bool)
    runs = tuple(attention._run([one], seen, "cpu", fill=True) for one in rows)
    assert all(run.length % 64 == 0 and run.length >= len(one) for run, one in zip(runs, rows))
    segments = PackSegments.of(cu, np.array(prefix), "cpu")
    segments.__dict__["runs"] = runs
    q, k, v = tensors(int(cu[-1]))
    out = segment_attention(
        torch.nn.Identity(), *(x.transpose(0, 1)[None] for x in (q, k, v)), None, segments=segments
    )
    wanted = plain(q, k, v, lengths, prefix)
    torch.testing.assert_close(out[0][0], wanted)
    back = torch.randn_like(wanted)
    for mine, other in zip(*(torch.autograd.grad(x, (q, k, v), back, retain_graph=True) for x in (out[0][0], wanted))):
        torch.testing.assert_close(mine, other)


def test_equal_sequences_as_they_lie_are_not_copied():
    (run,) = PackSegments.of([0, 4, 8, 12], [-1] * 3, "cpu").runs
    x = torch.randn(12, 2, 3)
    assert run.fill(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("lengths", list(itertools.product([1, 3, 8], repeat=3)), ids=str)
def test_filling_wastes_at_most_its_share(lengths):
    lengths = sorted(lengths, reverse=True)
    runs = PackSegments.of(np.concatenate([[0], np.cumsum(lengths)]), [-1] * 3, "cpu").runs
    filled = sum(run.count * run.length for run in runs)
    assert filled * (1 - attention.FILLING) <= sum(lengths) + 1e-9


@pytest.mark.parametrize(
    "more", [{"softcap": 0.7}, {"sinks": True}, {"softcap": 0.7, "sinks": True, "window": 3}], ids=str
)
@pytest.mark.parametrize("name", ["far", "shared"])
def test_soft_caps_sinks_and_narrow_values_are_kept(name, more):
    lengths, prefix = PACKS[name]
    q, k, v = tensors(sum(lengths))
    v, sinks = v[..., :5], torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    segments = PackSegments.of(np.concatenate([[0], np.cumsum(lengths)]), prefix, "cpu")
    got, _ = segment_attention(
        torch.nn.Module(),
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        None,
        segments=segments,
        scaling=DIM**-0.5,
        sliding_window=more.get("window"),
        softcap=more.get("softcap"),
        s_aux=sinks if "sinks" in more else None,
    )
    want = plain(q, k, v, lengths, prefix, more.get("window"), more.get("softcap"), sinks if "sinks" in more else None)
    torch.testing.assert_close(got[0], want)
    d_out, inputs = torch.randn_like(want), [q, k, v, *([sinks] if "sinks" in more else [])]
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, d_out) for out in (got[0], want)))


@pytest.mark.parametrize("odd", ["position_bias"])
def test_models_with_more_than_causal_attention_are_refused(odd):
    q = torch.zeros(1, 1, 2, 4)
    segments = PackSegments.of([0, 2], [-1], "cpu")
    with pytest.raises(TypeError, match=odd):
        segment_attention(torch.nn.Module(), q, q, q, None, segments=segments, **{odd: 1.0})
    with pytest.raises(TypeError, match="mask"):
        segment_attention(torch.nn.Module(), q, q, q, torch.zeros(2, 2), segments=segments)
    with pytest.raises(TypeError, match="mask"):
        segment_attention(torch.nn.Module(), q, q, q, None)
