"""NCCL's memory is set alike for trainer ranks and SGLang's servers."""

import pytest

from slime_core.clusters.nccl import MEMORY, agree
from slime_core.config.load import load_config

SERVERS = {"rollout": {"rollout_engine": "sglang"}, "cluster": {"device": "cuda", "colocate": False}}


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({}, {}, {MEMORY: "0"}),
        ({}, {MEMORY: "1"}, {MEMORY: "1"}),
        ({"sglang": {"enable-symm-mem": True}}, {}, {MEMORY: "1"}),
        ({"cluster": {"device": "cuda", "colocate": True}}, {}, {}),
        ({"cluster": {"device": "cpu", "colocate": False}}, {}, {}),
        ({"rollout": {"rollout_engine": "local"}}, {}, {}),
    ],
)
def test_both_sides_of_a_broadcast_share_memory_in_one_way(change, before, after):
    tables = {**SERVERS, "sglang": {}, **change}
    config = load_config(None)
    sections = {name: getattr(config, name).model_copy(update=tables[name]) for name in ("rollout", "cluster")}
    environment = dict(before)

    agree(config.model_copy(update={**sections, "sglang": tables["sglang"]}), environment)

    assert environment == after
