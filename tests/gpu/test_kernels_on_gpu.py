"""The Triton kernels of slime_core/kernels on a GPU: against their references, bits of the invariant mode, capture."""

import pytest
import torch
from kernel_cases import (
    FORMS,
    attention_case,
    check_cache,
    check_invariance,
    check_not_finite,
    check_paged,
    check_sampling,
    check_uniforms,
    check_varlen,
    form_options,
    knobs,
)

from slime_core.kernels.attention import AttentionBatch, paged_attention
from slime_core.kernels.sampling import sample

pytestmark = pytest.mark.gpu

GPU = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = {
    "smollm2": (9, 3, 64, 64),
    "qwen3": (16, 8, 128, 128),
    "one head": (4, 4, 80, 80),
    "gemma": (8, 4, 256, 256),
    "deepseek": (16, 16, 192, 128),
    "many queries a key": (24, 1, 96, 96),
}
CASES = [
    *((shape, torch.bfloat16, form) for shape in ("smollm2", "qwen3") for form in FORMS),
    *((shape, torch.bfloat16, "together") for shape in SHAPES if shape not in ("smollm2", "qwen3")),
    *((shape, dtype, "sinks") for shape in ("smollm2", "gemma") for dtype in (torch.float16, torch.float32)),
]
"""Shape, dtype and form; every combination is a kernel to compile."""
LONG = (700, 1, 33, 300, 64, 1025), (1, 1, 33, 120, 64, 1)


@pytest.mark.parametrize(("name", "dtype", "form"), CASES, ids=str)
def test_paged_attention_of_a_mixed_batch_is_the_reference(name, dtype, form):
    shape = SHAPES[name]
    check_paged(attention_case(GPU, dtype, *shape, 16, *LONG), form_options(form, shape[0], GPU), dtype)


@pytest.mark.parametrize("page", [16, 64, 128, 5])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_decode_splits_and_page_sizes_are_the_reference(page, rows):
    lengths = [(37 * i) % 900 + 1 for i in range(rows)]
    for form in ("plain", "window", "sinks"):
        case = attention_case(GPU, torch.bfloat16, 9, 3, 64, 64, page, lengths, [1] * rows)
        check_paged(case, form_options(form, 9, GPU), torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype", "form"), CASES, ids=str)
def test_varlen_attention_and_its_gradients_are_the_reference(name, dtype, form):
    check_varlen(GPU, dtype, *SHAPES[name], (130, 1, 300, 64), form)


@pytest.mark.parametrize(("name", "dtype", "form"), CASES, ids=str)
def test_invariant_attention_has_one_set_of_bits(name, dtype, form):
    lengths = (130, 7, 300, 64, 513)
    shape = SHAPES[name]
    case = attention_case(GPU, dtype, *shape, 16, lengths, lengths)
    check_invariance(case, form_options(form, shape[0], GPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rotated", "norm"), [(64, True), (64, False), (32, True), (48, False)])
def test_heads_are_stored_as_by_the_reference(rotated, norm, dtype):
    check_cache(GPU, dtype, 9, 3, 64, rotated, norm, rows=300, page=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab", [49152, 151936, 262144, 50257, 3])
def test_samples_are_those_of_the_reference(vocab, filters, dtype):
    check_sampling(GPU, dtype, 300 if vocab < 100_000 else 120, vocab, filters=filters)


def test_samples_among_equal_logits_are_those_of_the_reference():
    check_sampling(GPU, torch.float32, 300, 999, filters=True, ties=True)
    check_uniforms(GPU)
    check_not_finite(GPU)


def test_a_captured_step_reads_what_the_buffers_hold_later():
    first = attention_case(GPU, torch.bfloat16, 9, 3, 64, 64, 16, [300, 20, 7], [1, 1, 1])
    later = attention_case(GPU, torch.bfloat16, 9, 3, 64, 64, 16, [33, 900, 64], [1, 1, 1], seed=1)
    pages, columns = max(len(one[1]) for one in (first, later)), 64
    pools = [torch.zeros(pages, 16, 3, 64, dtype=torch.bfloat16, device=GPU) for _ in range(2)]
    query, logits = first[0].clone(), torch.randn(3, 5000, device=GPU)
    cu_rows, lengths, tables = (
        first[3].cu_rows.clone(), first[3].lengths.clone(), torch.zeros(3, columns, dtype=torch.int32, device=GPU),
    )  # fmt: skip
    arguments = [one.to(GPU) for one in knobs(3, 1, filters=True)]

    def step():
        batch = AttentionBatch(cu_rows, lengths, tables, 1)
        return paged_attention(query, *pools, batch, scale=0.2), sample(logits, *arguments)

    def fill(case):
        query.copy_(case[0])
        for pool, other in zip(pools, case[1:3]):
            pool[: len(other)] = other
        lengths.copy_(case[3].lengths)
        tables[:, : case[3].tables.shape[1]] = case[3].tables

    fill(first)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, drawn = step()
    fill(later)
    logits.copy_(torch.randn(3, 5000, device=GPU))
    graph.replay()
    expected, tokens = step()
    assert torch.equal(out, expected)
    assert torch.equal(drawn.tokens, tokens.tokens)
