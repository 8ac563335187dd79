"""Experts in one product against megatron-core's loop over them, and FSDP's against transformers', on a GPU."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
sys.path.append(str(Path(__file__).resolve().parents[2] / "plugins" / "slime_megatron" / "tests"))

from test_experts import COUNTS, HALF, SWIGLU, alone, assert_same, both, passed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch 2.11's own tracing
]

WIDE = {"hidden_size": 2048, "moe_ffn_hidden_size": 768}
UNEVEN = {"many": [700, 1, 0, 1300], "one row": [0, 1, 0, 0]}
FORMS = {"bfloat16": (SWIGLU | HALF, 1e-2), "fused": (SWIGLU | HALF | {"bias_activation_fusion": True}, 1e-2),
         "float32": (SWIGLU, 1e-4)}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def group():
    """What megatron-core's modules want."""
    with alone():
        yield


@pytest.mark.parametrize("counts", [*COUNTS.values(), *UNEVEN.values()], ids=[*COUNTS, *UNEVEN])
@pytest.mark.parametrize("form", FORMS)
def test_one_product_gives_what_the_loop_gives(form, counts):
    given, tolerance = FORMS[form]
    loop, ours = both("cuda", **given, **WIDE)
    meant, found = passed(loop, counts), passed(ours, counts)
    assert_same(found, meant, tolerance)


def test_an_activation_that_is_made_again_gives_the_same():
    given = SWIGLU | HALF | WIDE
    loop, _ = both("cuda", **given)
    _, ours = both("cuda", **given, recompute_granularity="selective", recompute_modules=["moe_act"])
    assert_same(passed(ours, UNEVEN["many"]), passed(loop, UNEVEN["many"]), 1e-2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_experts_of_fsdp_give_what_transformers_loop_gives(compiled):
    """Output and gradients in bfloat16 beside the loop in float64; experts without a row, and rows of all sizes."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from slime_core.trainers.fsdp.experts import IMPLEMENTATION, register

    register()
    torch.manual_seed(0)
    tokens, experts = 700, 40
    config = Qwen3MoeConfig(hidden_size=512, moe_intermediate_size=192, num_experts=experts)
    config._experts_implementation = IMPLEMENTATION
    layer = Qwen3MoeExperts(config).cuda()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.05)
    x, back = (torch.randn(tokens, 512, device="cuda") for _ in range(2))
    index = torch.rand(tokens, experts, device="cuda").mul_(torch.linspace(0, 1, experts, device="cuda")).topk(4)[1]
    weights, results = torch.rand(tokens, 4, device="cuda"), []
    for dtype in (torch.bfloat16, torch.float64):
        layer.to(dtype).zero_grad()
        config._experts_implementation = IMPLEMENTATION if dtype == torch.bfloat16 else "eager"
        run = torch.compile(layer) if compiled and dtype == torch.bfloat16 else layer
        leaves = [one.bfloat16().to(dtype).requires_grad_() for one in (x, weights)]
        out = run(leaves[0], index, leaves[1])
        gradients = torch.autograd.grad(out, [*leaves, *layer.parameters()], back.bfloat16().to(dtype))
        results.append([out.detach(), *gradients])
    for one, exact in zip(*results, strict=True):
        assert float((one.double() - exact).norm() / exact.norm()) < 1e-2
