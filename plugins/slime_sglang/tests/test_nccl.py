"""NCCL's memory is set alike for trainer ranks and SGLang's servers."""

import pytest

from slime_core.clusters.host import NCCL_MEMORY as MEMORY
from slime_core.config.schema import Config
from slime_sglang.start import agree

SERVERS = {"rollout": {"rollout_engine": "sglang"}, "cluster": {"device": "cuda", "colocate": False}}


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({}, {}, {MEMORY: "0"}),
        ({}, {MEMORY: "1"}, {MEMORY: "1"}),
        ({"sglang": {"enable-symm-mem": True}}, {}, {MEMORY: "1"}),
        ({"cluster": {"device": "cuda", "colocate": True}}, {}, {}),
        ({"cluster": {"device": "cpu", "colocate": False}}, {}, {}),
    ],
)
def test_both_sides_of_a_broadcast_share_memory_in_one_way(change, before, after):
    environment = dict(before)
    agree(Config.model_validate({**SERVERS, **change}), environment)
    assert environment == after
