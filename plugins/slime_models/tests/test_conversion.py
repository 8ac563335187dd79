"""Every family: a folder goes to torch_dist and comes back bit for bit, and loads."""

import pytest
import torch

from slime_convert.folder_writing import How
from slime_core.weights.shards import Shards
from slime_megatron.convert.conversion import dist_to_hf, hf_to_dist

pytestmark = pytest.mark.unit


def test_a_round_trip_is_bit_identical(small, tmp_path):
    def find(config):
        return small.bridge

    hf_to_dist(small.folder, tmp_path / "dist", find, How(verify=True))
    dist_to_hf(tmp_path / "dist", tmp_path / "hf", small.folder, find, How(verify=True, shard=20000))
    back = Shards.open(tmp_path / "hf")
    assert set(small.shards) - set(back) <= ({"lm_head.weight"} if small.sizes.tied else set())
    for name in back:
        first, second = small.shards[name], back[name]
        assert first.dtype == second.dtype, name
        assert torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)), name


def test_a_folder_that_was_converted_and_back_loads_in_transformers(small, tmp_path):
    from transformers import AutoModelForCausalLM

    hf_to_dist(small.folder, tmp_path / "dist", lambda config: small.bridge, How())
    dist_to_hf(tmp_path / "dist", tmp_path / "hf", small.folder, lambda config: small.bridge, How())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (small.folder, tmp_path / "hf")
        )
    assert torch.equal(one, other)
