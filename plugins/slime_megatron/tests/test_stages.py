"""What counts as a layer of a pipeline, and residuals in float32: nothing that is computed changes but rounding.

The ranks of `stages_main.py` do all of it, with a model of three layers.
"""

import json
from pathlib import Path

import pytest

from slime_core.testing import tiny_model

pytest.importorskip("megatron.core", reason="an optional extra: pip install slime-rl[megatron]")
pytestmark = pytest.mark.integration

MAIN = Path(__file__).with_name("stages_main.py")
LAYERS = {
    "data": [[1, 2, 3], [1, 2, 3]],
    "embedding": [[1], [2, 3]],
    "loss": [[1, 2], [3]],
    "embedding again": [[1], [2, 3]],
}


@pytest.fixture(scope="module")
def ranks(zygote, tmp_path_factory):
    """What both found."""
    root = tmp_path_factory.mktemp("root")
    tiny_model(root / "dense", tied=True, layers=3)
    zygote.together(tmp_path_factory.mktemp("said"), [[MAIN, rank, root] for rank in range(2)])
    return [json.loads((root / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("split", LAYERS)
def test_the_embedding_or_the_output_counts_as_a_layer_and_log_probs_are_the_same(ranks, split):
    for rank, found in enumerate(ranks):
        assert found["splits"][split]["layers"] == LAYERS[split][rank]
        assert found["splits"][split]["log_probs"] < 1e-6
        assert found["splits"][split]["fingerprint"] == ranks[0]["splits"]["data"]["fingerprint"]


@pytest.mark.parametrize("split", ["embedding", "loss", "embedding again"])
def test_one_split_goes_on_with_the_checkpoint_of_another(ranks, split):
    for found in ranks:
        saved, restored = found["splits"][split]["restored"]
        assert saved == restored != found["splits"][split]["fingerprint"]
        assert found["splits"][split]["restored log_probs"] < 1e-6


def test_residuals_in_float32_change_nothing_that_is_float32(ranks):
    for found in ranks:
        assert found["residuals"]["float32 True"]["rows"] == found["residuals"]["float32 False"]["rows"]


def test_residuals_in_float32_are_handed_on_and_round_less(ranks):
    for found in ranks:
        plain, wide = (found["residuals"][f"bfloat16 {wide}"] for wide in (False, True))
        assert (plain["handed on"], wide["handed on"]) == ("torch.bfloat16", "torch.float32")
        assert 0 < wide["error"] < 0.9 * plain["error"]
        assert wide["rows"][0] != wide["rows"][1]
