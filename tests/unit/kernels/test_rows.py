"""Norm, rotary and gated activation: references against transformers' modules."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from slime_core.kernels.gated import gated
from slime_core.kernels.norm import add_rms_norm, rms_norm
from slime_core.kernels.rotary import rotate, tables

pytestmark = pytest.mark.unit

DTYPES = (torch.float32, torch.bfloat16)


def _draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)], ids=["llama", "gemma"])
def test_norm_has_the_bits_of_the_family_s(family, offset, dtype):
    module = family(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.copy_(_draw(48))
    x, residual = _draw(2, 7, 48, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, module.weight, 1e-5, offset), module(x), rtol=0, atol=0)
    normed, total = add_rms_norm(x, residual, module.weight, 1e-5, offset)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(normed, module(x + residual), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_has_the_bits_of_transformers(dtype):
    q, k = _draw(5, 4, 16, dtype=dtype), _draw(5, 2, 16, dtype=dtype)
    angles = _draw(5, 8).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    references = apply_rotary_pos_emb(*(x[None].transpose(1, 2) for x in (q, k)), cos[None], sin[None])
    for turned, reference in zip(rotate(q, k, cos, sin), references):
        torch.testing.assert_close(turned, reference[0].transpose(0, 1), rtol=0, atol=0)


def test_tables_are_the_module_s_whatever_their_length():
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    like = torch.empty(0, dtype=torch.bfloat16)
    cos, sin = tables(rotary, like, 1500)
    longer = tables(rotary, like, 3000)
    assert all(len(one) >= 1500 and torch.equal(one, other[: len(one)]) for one, other in zip((cos, sin), longer))
    for table, reference in zip((cos, sin), rotary(like.new_zeros(1, 1), torch.arange(1500)[None])):
        torch.testing.assert_close(table[:1500], reference[0], rtol=0, atol=0)


def test_numbers_beyond_the_rotated_ones_are_copied():
    q, k, angles = _draw(5, 4, 16), _draw(5, 2, 16), _draw(5, 2).repeat(1, 2)
    turned, _ = rotate(q, k, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gated_activation_has_the_bits_of_the_family_s(ours, theirs, dtype):
    both = _draw(5, 48, dtype=dtype)
    reference = ACT2FN[theirs](both[:, :24]) * both[:, 24:]
    torch.testing.assert_close(gated(both, ours), reference, rtol=0, atol=0)
