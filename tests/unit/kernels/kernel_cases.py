"""Checks of Triton kernels against their PyTorch references, for a GPU and for Triton's interpreter."""

import os
from contextlib import contextmanager
from itertools import accumulate

import torch

from slime_core.kernels.attention import AttentionBatch, paged_attention, varlen_attention
from slime_core.kernels.cache import norm_rotate_store, store
from slime_core.kernels.sampling import log_softmax_at, sample, uniforms

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FORMS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "together": {"window": 5, "softcap": 2.0, "sinks": True},
}


@contextmanager
def _references():
    setting = os.environ.pop("TRITON_INTERPRET", None)
    yield
    if setting is not None:
        os.environ["TRITON_INTERPRET"] = setting


def by_reference(function, *arguments, **options):
    """The PyTorch reference of a kernel on the CPU."""
    with _references():
        cpu = {name: value.cpu() if torch.is_tensor(value) else value for name, value in options.items()}
        return function(*(one.cpu() if torch.is_tensor(one) else one for one in arguments), **cpu)


def near(ours, reference, dtype, factor=1.0):
    """Assert that two tensors agree within a dtype's rounding, relative to the largest number."""
    ours, reference = ours.detach().cpu().double(), reference.detach().double()
    scale = max(float(reference.abs().max()), 1e-3)
    worst = float((ours - reference).abs().max()) / scale
    assert worst < BOUNDS[dtype] * factor, f"{worst} over {BOUNDS[dtype] * factor}"


def attention_case(device, dtype, heads, kv_heads, width, value_width, page, lengths, rows, seed=0):
    """Queries, pools with stale numbers in unused places, and the batch that reads them."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draws).to(dtype).to(device)

    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=draws).int()
    tables = torch.full((len(lengths), max(counts) + 2), len(order) - 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = order[sum(counts[:row]) :][:count]
    keys, values = normal(len(order), page, kv_heads, width), normal(len(order), page, kv_heads, value_width)
    for row, length in enumerate(lengths):
        if length % page:
            for pool in (keys, values):
                pool[tables[row, counts[row] - 1], length % page :] = torch.nan
    cu_rows = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return (
        normal(sum(rows), heads, width),
        keys,
        values,
        AttentionBatch(cu_rows, lengths, tables.to(device), max(rows)),
    )


def form_options(form, heads, device):
    """Options of a named form of attention."""
    options = dict(FORMS[form], scale=0.2)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, heads, device=device)
    return options


def check_paged(case, options, dtype):
    """Kernel against reference, and against the invariant kernel."""
    query, keys, values, batch = case
    cpu = AttentionBatch(batch.cu_rows.cpu(), batch.lengths.cpu(), batch.tables.cpu(), batch.max_rows)
    reference = by_reference(paged_attention, query, keys, values, cpu, **options)
    for invariant in (False, True):
        near(paged_attention(query, keys, values, batch, invariant=invariant, **options), reference, dtype)


def gathered(pool, table, length):
    """The numbers of one sequence, [length, Hkv, D]."""
    return pool[table.long()].flatten(0, 1)[:length]


def check_invariance(case, options):
    """Rows alone, in chunks, in the batch and in packed sequences have the same bits; lengths equal rows."""
    query, keys, values, batch = case
    together = paged_attention(query, keys, values, batch, invariant=True, **options)
    bounds, lengths = batch.cu_rows.tolist(), batch.lengths.tolist()
    k, v = (torch.cat([gathered(pool, *one) for one in zip(batch.tables, lengths)]) for pool in (keys, values))
    packed = varlen_attention(query, k, v, batch.cu_rows, batch.max_rows, invariant=True, **options)
    assert torch.equal(packed, together)

    def alone(segment, begin, end):
        ints = {"dtype": torch.int32, "device": query.device}
        one = AttentionBatch(
            torch.tensor([0, end - begin], **ints),
            torch.tensor([end], **ints),
            batch.tables[segment, None],
            end - begin,
        )
        rows = query[bounds[segment] + begin : bounds[segment] + end]
        return paged_attention(rows, keys, values, one, invariant=True, **options)

    for segment, length in enumerate(lengths):
        reference = together[bounds[segment] :][:length]
        cut = length // 3
        assert torch.equal(torch.cat([alone(segment, 0, cut), alone(segment, cut, length)]), reference)
        assert torch.equal(alone(segment, length - 1, length), reference[-1:])


def check_varlen(device, dtype, heads, kv_heads, width, value_width, lengths, form, seed=0):
    """Output and gradients against the reference in float32."""
    draws = torch.Generator().manual_seed(seed)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)
    q, k, v, slope = (torch.randn(sum(lengths), *shape, generator=draws).to(dtype) for shape in shapes)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    options = form_options(form, heads, "cpu")
    sinks = [options["sinks"]] if "sinks" in options else []
    plain = [one.float().requires_grad_() for one in (q, k, v, *sinks)]
    with _references():
        if sinks:
            options["sinks"] = plain[3]
        reference = varlen_attention(*plain[:3], cu_seqlens, max(lengths), **options)
        expected = torch.autograd.grad(reference, plain, slope.float())
    joined = torch.cat([one.flatten(1) for one in (q, k, v)], 1).to(device)
    parts = joined.split([heads * width, kv_heads * width, kv_heads * value_width], 1)
    leaves = [one.view(len(joined), -1, size).detach() for one, size in zip(parts, (width, width, value_width))]
    leaves = [one.requires_grad_() for one in (*leaves, *(one.clone().to(device) for one in sinks))]
    if sinks:
        options["sinks"] = leaves[3]
    for invariant in (False, True):
        out = varlen_attention(*leaves[:3], cu_seqlens.to(device), max(lengths), invariant=invariant, **options)
        near(out, reference, dtype)
        grads = [torch.autograd.grad(out, leaves, slope.to(device), retain_graph=True) for _ in range(2)]
        for ours, again, theirs in zip(*grads, expected):
            near(ours, theirs, dtype, 2)
            assert torch.equal(ours, again)


def check_cache(device, dtype, heads, kv_heads, width, rotated, norm, rows=5, page=4):
    """Heads normalised, rotated and stored, and plain storing."""
    draws = torch.Generator().manual_seed(2)
    qkv = torch.randn(rows, heads + 2 * kv_heads, width, generator=draws).to(dtype)
    angles = torch.rand(50, rotated // 2, generator=draws).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.randint(0, 50, (rows,), generator=draws)
    places = torch.randperm(3 * rows, generator=draws)[:rows]
    places[1] = -1
    weights = torch.rand(heads + kv_heads, width, generator=draws).to(dtype) + 0.5 if norm else None
    pools = [torch.zeros(rows, page, kv_heads, width, dtype=dtype) for _ in range(4)]
    plain = qkv.clone()
    arguments = weights, 1e-6, cos, sin, positions, places
    by_reference(norm_rotate_store, plain, *arguments, *pools[:2], heads)
    ours = qkv.to(device)
    moved = [one.to(device) if torch.is_tensor(one) else one for one in (*arguments, *pools[2:])]
    norm_rotate_store(ours, *moved, heads)
    near(ours[:, :heads], plain[:, :heads], dtype)
    near(moved[-2], pools[0], dtype)
    assert torch.equal(moved[-1].cpu(), pools[1])
    assert torch.equal(moved[-2].cpu() == 0, pools[0] == 0)
    fresh = [torch.zeros(rows, page, kv_heads, width, dtype=dtype, device=device) for _ in range(2)]
    k, v = qkv.to(device).split([heads, kv_heads, kv_heads], 1)[1:]
    store(*fresh, places.to(device), k, v)
    for pool, new in zip(fresh, (k, v)):
        flat = torch.zeros(rows * page, kv_heads, width, dtype=dtype)
        flat[places[places >= 0]] = new.cpu()[places >= 0]
        assert torch.equal(pool.cpu().flatten(0, 1), flat)


def knobs(rows, seed, *, filters):
    """Seeds, positions, temperature, top-k and top-p of rows."""
    draws = torch.Generator().manual_seed(seed)

    def choose(*values):
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=draws)]

    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=draws)
    positions = torch.randint(0, 1 << 20, (rows,), generator=draws)
    off = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    return (
        seeds,
        positions,
        choose(0.0, 0.5, 1.0, 1.7),
        *((choose(0, 1, 5, 40), choose(0.3, 0.9, 1.0)) if filters else off),
    )


def check_sampling(device, dtype, rows, vocab, *, filters, ties=False, seed=5):
    """Tokens and log-probs against the reference; all but the odd one, at an edge, are the same."""
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=draws) * 3
    logits = (logits.round() if ties else logits).to(dtype)
    arguments = knobs(rows, seed, filters=filters)
    reference = by_reference(sample, logits, *arguments)
    ours = [one.cpu() for one in sample(logits.to(device), *(one.to(device) for one in arguments))]
    agree = ours[0] == reference.tokens
    for ours_at, reference_at in zip(ours[1:], reference[1:]):
        agree &= torch.isclose(ours_at, reference_at, rtol=2e-5, atol=2e-5)
    assert int((~agree).sum()) <= (rows > 100) + rows // 500
    ids, heat = ours[0].to(device), arguments[2].to(device)
    assert torch.equal(log_softmax_at(logits.to(device), ids).cpu(), ours[2])
    free = (arguments[2] > 0) & (arguments[3] == 0) & (arguments[4] == 1)
    assert torch.equal(log_softmax_at(logits.to(device), ids, heat).cpu()[free], ours[1][free])


def check_not_finite(device):
    """Rows with a NaN or an infinity have NaN log-probs; masked logits do not matter."""
    logits = torch.zeros(4, 5000, device=device)
    logits[0, 3], logits[1, 4900], logits[3, :4500] = torch.nan, torch.inf, -torch.inf
    ones = torch.ones(4, device=device)
    for heat, top_k in ((0.0, 0), (1.0, 3)):
        out = sample(logits, ones.long(), ones.long(), ones * heat, ones.long() * top_k, ones)
        assert out.plain_log_probs.isnan().tolist() == [True, True, False, False]
        assert int(out.tokens.min()) >= 0
        assert int(out.tokens.max()) < 5000
        assert int(out.tokens[3]) >= 4500


def check_uniforms(device):
    """Draws over equal logits show the hash: token = floor(u * vocab)."""
    rows, vocab = 24, 4096
    seeds, positions, *_ = knobs(rows, 9, filters=False)
    ones = torch.ones(rows)
    arguments = seeds, positions, ones, ones.long() * 0, ones
    tokens = sample(torch.zeros(rows, vocab, device=device), *(one.to(device) for one in arguments)).tokens
    with _references():
        assert torch.equal(tokens.cpu(), (uniforms(seeds, positions) * vocab).long())
