"""Weights in 4 and 8 bits on a GPU: the bits that a CPU gives, and bitsandbytes' own kernels."""

import pytest
import torch

from slime_core.kernels.quantised import QuantisedWeight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_a_gpu_stores_and_reads_the_numbers_of_a_cpu(form, dtype):
    weight = (torch.randn(3, 97, 256, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)
    cpu, gpu = (QuantisedWeight.of(weight.to(device), form, dtype) for device in ("cpu", "cuda"))
    assert torch.equal(gpu.numbers.cpu(), cpu.numbers)
    assert torch.equal(gpu.scales.cpu(), cpu.scales)
    assert torch.equal(gpu.dense().cpu(), cpu.dense())
    assert torch.equal(cpu.to("cuda").dense(), gpu.dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nf4_has_the_numbers_of_bitsandbytes_on_a_gpu(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 1024, device="cuda") * 0.05
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    state.dtype = dtype
    ours = QuantisedWeight.of(weight, "nf4", dtype)
    assert (ours.numbers.flatten() != packed.flatten()).sum() <= 4  # a number between two values goes either way
    other = QuantisedWeight(packed.view(512, 512), state.absmax.view(512, 16), ours.form, dtype)
    assert torch.equal(other.dense(), functional.dequantize_4bit(packed, state))
