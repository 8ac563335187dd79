"""Gradients summed and weights gathered beside passes change nothing: not a step, nor whatever reads weights after it.

A step changes a rank's share of each bucket; the rest is another rank's until it is gathered. Log-probs, a reference,
what engines get, checkpoints, verification: each comes right after a step in `overlap_main.py`, and is compared to the
bit with ranks that gather at once.
"""

import json
from pathlib import Path

import pytest

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

MAIN = Path(__file__).with_name("overlap_main.py")
LAYOUTS = {"data": (2, {}, False), "pipeline": (4, {"pipeline_model_parallel_size": 2}, True)}


@pytest.fixture(scope="module", params=[pytest.param("data", marks=pytest.mark.nightly), "pipeline"])
def ranks(request, zygote, tmp_path_factory):
    """What the ranks of a layout found; an output matrix of its own is one that no module's pass waits for."""
    root = tmp_path_factory.mktemp("root")
    world, flags, tied = LAYOUTS[request.param]
    tiny_model(root / "model", tied=tied)
    commands = [[MAIN, rank, world, root, "model", json.dumps(flags)] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), commands)
    return [json.loads((root / f"found-{rank}.json").read_text()) for rank in range(world)]


def test_steps_and_whatever_reads_weights_are_those_of_ranks_that_wait(ranks):
    for found in ranks:
        assert found["wrong"] == []
        assert found["compared"] > 15


def test_there_was_something_to_wait_for(ranks):
    for found in ranks:
        assert found["ungathered"]
        assert found["micro_batches"] > 1
    assert max(found["buckets"] for found in ranks) > 3
