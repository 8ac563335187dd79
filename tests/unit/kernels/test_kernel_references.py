"""The kernels' PyTorch references against transformers' attention and norms."""

import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as sink_attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from slime_core.kernels.attention import AttentionBatch, paged_attention, varlen_attention
from slime_core.kernels.cache import norm_rotate_store, store
from slime_core.kernels.sampling import sample

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, PAGE = 6, 2, 24, 16, 4
LENGTHS, NEW = (9, 1, 17, 6), (1, 1, 17, 4)
FORMS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
}


def _sequences(seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randn(length, heads, width, generator=draws)
            for heads, width in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH))
        )
        for length in LENGTHS
    ]


def _eager(query, key, value, form):
    """Transformers' eager attention over one sequence, [L, Hq, Dv]."""
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = HEADS // KV_HEADS, False
    position = torch.arange(len(query))
    hidden = position[None] > position[:, None]
    if "window" in form:
        hidden |= position[None] <= position[:, None] - form["window"]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    states = [one.transpose(0, 1)[None] for one in (query, key, value)]
    if "sinks" in form:
        module.sinks = form["sinks"]
        return sink_attention(module, *states, mask, scaling=0.3)[0][0]
    return capped_attention(module, *states, mask, scaling=0.3, softcap=form.get("softcap"))[0][0]


def _pages(sequences):
    """Pools, tables and flat places of the sequences' keys and values, over pages in a random order."""
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).int()
    pools = [torch.full((len(order), PAGE, KV_HEADS, width), torch.nan) for width in (WIDTH, VALUE_WIDTH)]
    tables = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = order[sum(counts[:row]) :][:count]
    for (_, key, value), table in zip(sequences, tables):
        position = torch.arange(len(key))
        store(*pools, table[position // PAGE].long() * PAGE + position % PAGE, key, value)
    return *pools, tables


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_both_attentions_are_transformers_eager_one(form):
    sequences = _sequences()
    reference = [_eager(*sequence, form) for sequence in sequences]
    keys, values, tables = _pages(sequences)
    cu_rows = torch.tensor([0, *np.cumsum(NEW)], dtype=torch.int32)
    batch = AttentionBatch(cu_rows, torch.tensor(LENGTHS, dtype=torch.int32), tables, max(NEW))
    query = torch.cat([q[len(q) - new :] for (q, _, _), new in zip(sequences, NEW)])
    paged = paged_attention(query, keys, values, batch, scale=0.3, **form)
    torch.testing.assert_close(paged, torch.cat([one[len(one) - new :] for one, new in zip(reference, NEW)]))
    packed = [torch.cat(column) for column in zip(*sequences)]
    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    torch.testing.assert_close(
        varlen_attention(*packed, cu_seqlens, max(LENGTHS), scale=0.3, **form), torch.cat(reference)
    )


@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("norm", [True, False])
def test_heads_are_normalised_rotated_and_stored_as_by_transformers(norm, rotated):
    rows, dim = 5, 16
    draws = torch.Generator().manual_seed(2)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, dim, generator=draws)
    angles = torch.rand(50, rotated // 2, generator=draws).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    positions, places = torch.tensor([3, 49, 0, 7, 7]), torch.tensor([5, -1, 0, 11, 2])
    q, k, v = qkv.clone().split([HEADS, KV_HEADS, KV_HEADS], 1)
    weights = torch.rand(2, dim, generator=draws) + 0.5
    head_norms = None
    if norm:
        modules = [Qwen3RMSNorm(dim, eps=1e-6) for _ in weights]
        for module, weight in zip(modules, weights):
            module.weight.data = weight
        with torch.no_grad():
            q, k = modules[0](q), modules[1](k)
        head_norms = torch.cat([weights[:1].expand(HEADS, -1), weights[1:].expand(KV_HEADS, -1)])
    turned = [
        apply_rotary_pos_emb(*([x[None, ..., :rotated]] * 2), cos[positions][None], sin[positions][None], 2)[0][0]
        for x in (q, k)
    ]
    q, k = (torch.cat([new, x[..., rotated:]], -1) for new, x in zip(turned, (q, k)))
    keys, values = (torch.zeros(3, PAGE, KV_HEADS, dim) for _ in range(2))
    norm_rotate_store(qkv, head_norms, 1e-6, cos, sin, positions, places, keys, values, HEADS)
    torch.testing.assert_close(qkv[:, :HEADS], q, rtol=1e-6, atol=1e-6)
    for pool, new in ((keys, k), (values, v)):
        reference = torch.zeros_like(pool)
        for row, place in enumerate(places.tolist()):
            if place >= 0:
                reference[place // PAGE, place % PAGE] = new[row]
        torch.testing.assert_close(pool, reference, rtol=1e-6, atol=1e-6)


def test_logits_that_are_not_finite_are_seen_in_the_log_prob():
    logits = torch.zeros(3, 10)
    logits[0, 3], logits[1, 3] = torch.nan, torch.inf
    ones = torch.ones(3)
    log_probs = sample(logits, ones.long(), ones.long(), ones, ones.long() * 0, ones).plain_log_probs
    assert log_probs.isnan().tolist() == [True, True, False]
