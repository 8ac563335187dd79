"""A GPU's layers in Triton's interpreter, against transformers' own and autograd."""

from functools import partial

import numpy as np
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from slime_core.lora.layers import attach
from slime_core.lora.spec import LoraSpec
from slime_core.trainers import flash
from slime_core.trainers.fsdp import attention, fused, fused_cuda
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.fsdp.fused_adapters import AdaptedPass
from slime_core.trainers.fsdp.fused_adapters_cuda import AdaptedGpuPass
from slime_core.trainers.fsdp.low_rank import lay_side_by_side
from slime_core.trainers.fsdp.masters import Masters

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 3, 0, 1, 2]])
SEGMENTS = PackSegments.of(np.array([0, 3, 5, 6, 9]), np.array([-1, 0, 0, -1]), "cpu")


def spans(q, k, v, cu, _cu, _most, _more, _dropout, causal, *_, scale, window_size_left, window_size_right):
    """What the flash kernel of a GPU computes."""
    assert (causal, window_size_left, window_size_right) == (True, -1, 0)
    parts = []
    for start, stop in zip(cu.tolist(), cu[1:].tolist()):
        rows = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(scaled_dot_product_attention(*rows, is_causal=True, scale=scale, enable_gqa=True)[0])
    return torch.cat(parts, 1).transpose(0, 1), torch.empty(0)


def spans_backward(grad, q, k, v, out, _sums, *call, **options):
    """Its gradients."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again = spans(*leaves, *call, **options)[0]
        torch.testing.assert_close(again.detach(), out)
        return torch.autograd.grad(again, leaves, grad)


def layer_of(family):
    head = {"head_dim": 16} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **head)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.set_attn_implementation(attention.NAME)
    return model, model.model.layers[0], config


def compare(family):
    """Output and gradients, in the ways that a pass may go; the sums of masters over two passes."""
    model, layer, config = layer_of(family)
    x, grad = torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    known = {"position_embeddings": model.model.rotary_emb(x, position_ids=POSITIONS), "segments": SEGMENTS}
    parameters = dict(layer.named_parameters())
    rows = x.clone().requires_grad_()
    out = layer(rows, attention_mask=None, **known)
    wanted = [out.detach(), *torch.autograd.grad(out, [rows, *parameters.values()], grad)]
    forward = fused.fuse(layer, config)
    fused.Pass = fused_cuda.GpuPass  # on a CPU, too
    for recompute, end_to_end in ((False, False), (True, False), (False, True)):
        fused_cuda.by_varlen = lambda *_, answer=end_to_end: answer
        rows = x.clone().requires_grad_()
        out = forward(rows, recompute=recompute, **known)
        results = [out.detach(), *torch.autograd.grad(out, [rows, *parameters.values()], grad)]
        torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-5)
    masters = Masters(layer, torch.float32)
    for _ in range(2):
        forward(x, recompute=False, masters=masters, **known).backward(grad)
    sums = masters.gradients()
    assert list(sums) == list(parameters)
    torch.testing.assert_close([g / 2 for g in sums.values()], wanted[2:], rtol=1e-4, atol=1e-5)


def compare_adapters(family):
    """Layers with adapters, some of their linear layers without, on a CPU and as on a GPU; and their base."""
    model, layer, config = layer_of(family)
    model.requires_grad_(False)
    lay_side_by_side(model)
    adapters = attach(model, LoraSpec(rank=4, exclude_modules=("k_proj", "gate_proj")), seed=0)
    parameters = dict(layer.named_parameters())
    learning = [p for p in parameters.values() if p.requires_grad]
    with torch.no_grad():
        for parameter in learning:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    x, grad = torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    known = {"position_embeddings": model.model.rotary_emb(x, position_ids=POSITIONS), "segments": SEGMENTS}
    for name, leaves in ((adapters.active, learning), (None, [])):
        for one in (AdaptedPass, AdaptedGpuPass):
            forward = fused.fuse(layer, config, None, (one, one))
            for recompute in (False, True):
                results = []
                for call in (partial(layer, attention_mask=None), partial(forward, recompute=recompute)):
                    rows = x.clone().requires_grad_()
                    with adapters.using(name):
                        out = call(rows, **known)
                    results.append([out.detach(), *torch.autograd.grad(out, [rows, *leaves], grad)])
                torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def check(*families):
    torch.manual_seed(0)
    attention.register()
    flash.FLASH.forward, flash.FLASH.backward = spans, spans_backward
    for name in families:
        compare_adapters(name)
        compare(name)
