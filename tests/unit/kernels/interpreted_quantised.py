"""Weights in 4 and 8 bits in Triton's interpreter: the floats by hand, of sizes that fill no program, and joined."""

import torch

from slime_core.kernels.linear import joined
from slime_core.kernels.quantised import FORMS, NumberForm, QuantisedWeight, dequantise
from slime_core.weights.nf4 import NF4


def floats(numbers, scales, form):
    values = numbers.view(torch.float8_e4m3fn).float()
    if form.per_byte == 2:
        values = torch.tensor(NF4)[torch.stack((numbers >> 4, numbers & 15), -1).flatten(-2).int()]
    return values * scales.float().repeat_interleave(form.block, -1)


def check():
    torch.manual_seed(0)
    for form in (FORMS["nf4"], FORMS["fp8"], NumberForm("nf4", 96, 2)):
        for dtype in (torch.float32, torch.bfloat16):
            numbers = torch.randint(0, 120, (2, 67, 384 // form.per_byte), dtype=torch.uint8)
            scales = torch.rand(2, 67, 384 // form.block).to(dtype)
            assert torch.equal(dequantise(numbers, scales, form, torch.float32), floats(numbers, scales, form)), form
    weights = [QuantisedWeight.of(torch.randn(rows, 128), "nf4", torch.float32) for rows in (33, 64, 1)]
    assert torch.equal(joined(weights), torch.cat([weight.dense() for weight in weights]))
