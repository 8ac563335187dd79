"""Experts in one product of torch's kernel against megatron-core's loop over them, on a GPU."""

import sys
from pathlib import Path

import pytest

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
