"""Checks of `kernel_cases` over tiny shapes in Triton's interpreter."""

import torch
from kernel_cases import (
    attention_case,
    check_cache,
    check_invariance,
    check_not_finite,
    check_paged,
    check_sampling,
    check_uniforms,
    check_varlen,
    form_options,
)

CPU, SINGLE = "cpu", torch.float32


def check():
    for form, heads, kv_heads in (("plain", 2, 1), ("together", 4, 2)):
        mixed = attention_case(CPU, SINGLE, heads, kv_heads, 24, 16, 4, (9, 1, 40, 33), (1, 1, 40, 4))
        check_paged(mixed, form_options(form, heads, CPU), SINGLE)
        check_varlen(CPU, SINGLE, heads, kv_heads, 24, 16, (1, 19, 7), form)
    check_paged(attention_case(CPU, SINGLE, 2, 1, 16, 16, 16, (300, 1, 70), (1, 1, 1)), {"scale": 0.2}, SINGLE)
    check_invariance(attention_case(CPU, SINGLE, 3, 1, 16, 16, 16, (70, 5, 33), (70, 5, 33)), {"scale": 0.2})
    for rotated, norm in ((16, True), (8, False)):
        check_cache(CPU, SINGLE, 6, 2, 16, rotated, norm)
    check_sampling(CPU, SINGLE, 12, 4099, filters=False)
    check_sampling(CPU, torch.bfloat16, 5, 300, filters=True)
    check_sampling(CPU, SINGLE, 4, 130, filters=True, ties=True)
    check_not_finite(CPU)
    check_uniforms(CPU)
