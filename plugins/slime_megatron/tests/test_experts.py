"""Experts in one product against megatron-core's loop over them: outputs and gradients, however tokens fall."""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from cuda_on_cpu import cpu_redirect

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    from slime_megatron import experts
    from slime_megatron.experts import GroupedExperts, LastFirst, product, stacked

pytestmark = pytest.mark.unit

COUNTS = {"all": [5, 2, 4, 3], "some have none": [0, 9, 0, 5], "one": [0, 0, 0, 14], "no token": [0, 0, 0, 0]}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}
SHAPE = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "add_bias_linear": False,
    "num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_grouped_gemm": True, "use_cpu_initialization": True,
}  # fmt: skip
FUSED = {"bias_activation_fusion": True}
FORMS = {
    "swiglu": SWIGLU,
    "swiglu fused": SWIGLU | FUSED,
    "swiglu clamped": SWIGLU | {"activation_func_clamp_value": 0.3},
    "quick geglu": {"gated_linear_unit": True, "activation_func": quick_gelu, "glu_linear_offset": 1.0},
    "quick geglu fused": {"gated_linear_unit": True, "activation_func": quick_gelu, "glu_linear_offset": 1.0} | FUSED,
    "gelu": {"activation_func": torch.nn.functional.gelu},
    "weights on the input": SWIGLU
    | {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "bfloat16": SWIGLU | HALF,
}


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


@pytest.fixture(scope="module", autouse=True)
def group():
    """What megatron-core's modules want."""
    with alone():
        yield


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_loop(form, counts):
    loop, ours = both(**FORMS[form])
    with torch.compiler.set_stance("force_eager"):
        meant, found = passed(loop, counts), passed(ours, counts)
    assert_same(found, meant, 1e-2 if form == "bfloat16" else 1e-6)
    assert sum(counts) == 0 or meant["out"].float().norm() > 0.1


def test_biases_are_added_at_each_experts_rows():  # the loop cannot: it writes into what a view gave it
    _, ours = both(**SWIGLU, add_bias_linear=True)
    rows, probs, counts = torch.randn(6, 32), torch.rand(6), [1, 0, 3, 2]
    found, _ = ours(rows, torch.tensor(counts), probs)
    parts = zip(rows.split(counts), probs.split(counts), ours.local_experts, strict=True)
    meant = []
    for part, weight, expert in parts:
        gate, up = (part @ expert.linear_fc1.weight.T + expert.linear_fc1.bias).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up @ expert.linear_fc2.weight.T + expert.linear_fc2.bias
        meant.append(hidden * weight[:, None])
    torch.testing.assert_close(found, torch.cat(meant))
    found.sum().backward()
    none, some = ours.local_experts[1].linear_fc2.bias.grad, ours.local_experts[2].linear_fc2.bias.grad
    assert not none.any()
    torch.testing.assert_close(some, probs[1:4].sum().expand(32))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_an_activation_that_is_made_again_gives_the_same_and_is_not_kept(counts):
    loop, _ = both(**SWIGLU)
    _, ours = both(**SWIGLU, recompute_granularity="selective", recompute_modules=["moe_act"])
    sizes = []
    with cpu_redirect():
        rows = torch.randn(sum(counts), 32, requires_grad=True)
        out, _ = ours(rows, torch.tensor(counts), torch.rand(sum(counts)))
        for tensor in out.grad_fn.saved_tensors[:1]:  # what the second product reads in the backward pass
            sizes.append(tensor.untyped_storage().nbytes())
        found = passed(ours, counts)
    assert sizes == [0]
    assert_same(found, passed(loop, counts), 1e-6)


def test_parameters_have_the_names_of_the_loop_and_those_of_the_last_expert_come_first():
    loop, ours = both(**SWIGLU)
    names = [name for name, _ in ours.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in loop.named_parameters())
    assert names[0] == "local_experts.3.linear_fc1.weight"
    assert [expert is ours.local_experts[n] for n, expert in enumerate(ours.local_experts)] == [True] * 4
    assert isinstance(ours, GroupedExperts)
    assert isinstance(ours.local_experts, LastFirst)


def test_weights_that_lie_at_equal_distances_are_not_copied():
    buffer = torch.arange(4 * 12.0)
    weights = [buffer[n * 12 + 4 : n * 12 + 12].view(2, 4) for n in range(4)]
    found = stacked(weights)
    assert found.data_ptr() == weights[0].data_ptr()
    assert torch.equal(found, torch.stack(weights))
    for others in (weights[::-1], [weights[0], *weights[2:]], [weights[0], weights[0]], [w.clone() for w in weights]):
        found = stacked(others)
        assert found.data_ptr() != others[0].data_ptr()
        assert torch.equal(found, torch.stack(others))
    assert stacked(weights[2:3]).data_ptr() == weights[2].data_ptr()


@pytest.mark.parametrize("direct", [False, True], ids=["a leaf a weight", "direct"])
@pytest.mark.parametrize("together", [True, False], ids=["one buffer", "apart"])
def test_gradients_are_added_to_those_that_megatron_keeps(together, direct):
    rows, ends = torch.randn(6, 8), torch.tensor([1, 1, 6], dtype=torch.int32)
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    buffer = torch.ones(3, 4, 8)
    for weight, total in zip(weights, buffer if together else [part.clone() for part in buffer], strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = total, False
    for count in (1, 2):
        product(rows, ends, weights, within=True, direct=direct).sum().backward()
        sums = torch.stack([rows[:1].sum(0), torch.zeros(8), rows[1:].sum(0)])
        for weight, one in zip(weights, sums, strict=True):
            torch.testing.assert_close(weight.main_grad, 1 + count * one.expand(4, 8))
            assert weight.grad_added_to_main_grad
    product(rows, ends, weights).sum().backward()
    torch.testing.assert_close(weights[0].main_grad, 1 + 2 * sums[0].expand(4, 8))


def test_a_weight_that_is_frozen_has_no_gradient_and_rows_have():
    rows = torch.randn(6, 8, requires_grad=True)
    weights = [torch.randn(4, 8) for _ in range(3)]
    product(rows, torch.tensor([1, 1, 6], dtype=torch.int32), weights).sum().backward()
    meant = torch.cat([weights[0].sum(0)[None], weights[2].sum(0).expand(5, 8)])
    torch.testing.assert_close(rows.grad, meant)


def test_a_weight_is_waited_for_before_it_is_read():
    _, ours = both(**SWIGLU)
    waited = []
    for module in ours.modules():
        module.register_forward_pre_hook(lambda one, _: waited.extend(one.parameters(recurse=False)))
    ours(torch.randn(4, 32), torch.tensor([1, 1, 1, 1]), torch.rand(4))
    assert {id(one) for one in waited} == {id(one) for one in ours.parameters()}
