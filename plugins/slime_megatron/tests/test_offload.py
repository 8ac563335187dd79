"""An optimizer in main memory: the same steps to the bit, and states that either kind saves and the other goes on with.

The ranks of `offload_main.py` do all of it, and the tests look at what they found. Both kinds
use torch's fused AdamW there: the one on the device has another kernel by default, whose step is compared as numbers.
"""

import json
import shutil
from pathlib import Path

import pytest
from family_models import mixture

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

MAIN = Path(__file__).with_name("offload_main.py")
LAYOUTS = {
    "data": ("dense", "float32,bfloat16", {}),
    "tensor": ("dense", "bfloat16", {"tensor_model_parallel_size": 2}),
    "experts": ("moe", "bfloat16", {"expert_model_parallel_size": 2}),
}
CASES = ("all", "half")


@pytest.fixture(
    scope="module",
    params=[pytest.param("data", marks=pytest.mark.nightly), *(name for name in LAYOUTS if name != "data")],
)
def ranks(request, zygote, tmp_path_factory):
    """What both ranks of a layout found, by dtype."""
    root = tmp_path_factory.mktemp("root")
    name, dtypes, flags = LAYOUTS[request.param]
    (tiny_model if name == "dense" else mixture)(root / name)
    commands = [[MAIN, rank, 2, root, name, dtypes, json.dumps(flags)] for rank in range(2)]
    zygote.together(tmp_path_factory.mktemp("said"), commands)
    found = [json.loads((root / f"found-{n}.json").read_text()) for n in range(2)]
    shutil.rmtree(root)
    return [one for rank in found for one in rank.values()]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_an_optimizer_on_the_device(ranks, case):
    for found in ranks:
        one = found["cases"][case]
        assert found["moved"] > 1e-3
        assert all(found["clipped"])
        assert one["near"] < 1e-6
        assert one["second"] == [True, True]
        assert one["third"] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_what_is_published_is_the_updated_weights(ranks, case):
    for found in ranks:
        assert all(found["cases"][case]["published"])
    assert len(ranks[0]["cases"][case]["published"]) > 10


def test_the_share_that_is_asked_for_is_in_main_memory(ranks):
    for found in ranks:
        for case in CASES:
            there, here = found["cases"][case]["placed"]
            if case == "half":
                assert 0.4 < there / (there + here) < 0.9
            else:
                assert there
                assert not here


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["loads", "fresh", "back"])
def test_checkpoints_of_either_kind_go_on_with_the_other(ranks, case, way):
    for found in ranks:
        assert found["cases"][case][way] == [True, True, True]


@pytest.mark.parametrize("case", CASES)
def test_all_state_goes_away_and_comes_back(ranks, case):
    for found in ranks:
        assert found["cases"][case]["parked"] == [0, True]
