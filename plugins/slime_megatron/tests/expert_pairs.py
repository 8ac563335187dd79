"""megatron-core's loop over experts and ours with the same weights, and what a pass through either gives."""

import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports
    from slime_megatron import experts

COUNTS = {"all": [5, 2, 4, 3], "some have none": [0, 9, 0, 5], "one": [0, 0, 0, 14], "no token": [0, 0, 0, 0]}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}
SHAPE = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "add_bias_linear": False,
    "num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_grouped_gemm": True, "use_cpu_initialization": True,
}  # fmt: skip


@contextmanager
def alone():
    """A group of one rank: megatron-core's loop asks for one. A trainer in this process may have made it already."""
    if dist.is_initialized():
        assert dist.get_world_size() == 1
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def both(device="cpu", **given):
    """megatron-core's experts and ours."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop, ours = (experts.alone({**SHAPE, **given}, grouped=grouped) for grouped in (False, True))
    with torch.no_grad():
        for parameter in loop.parameters():
            parameter.copy_(torch.randn_like(parameter) * 1.7 * parameter.shape[-1] ** -0.5)
    ours.load_state_dict(loop.state_dict())
    return loop.to(device), ours.to(device)


def passed(layer, counts):
    """What comes out, and every gradient, by name."""
    first, width = next(layer.parameters()), layer.config.hidden_size
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(sum(counts), width, generator=draw).to(first).requires_grad_()
    probs = torch.rand(sum(counts), generator=draw).to(first.device).requires_grad_()
    out, bias = layer(rows, torch.tensor(counts), probs)
    assert bias is None
    assert out.dtype == first.dtype
    (out.float() * torch.linspace(-1, 1, width, device=first.device)).sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "rows": rows.grad, "probs": probs.grad, **found}


def assert_same(found, meant, tolerance):
    """Every tensor is the same, by the error's norm over its own."""
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        if tensor is None:  # with its weight on the input, what comes of it has none
            assert found[name] is None or not found[name].any(), name
            continue
        error = (found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-9)
        assert error < tolerance, (name, error)
