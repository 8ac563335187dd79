"""Servers that others run, several at once: what all of them can do, and what they must have in common."""

import pytest

from slime_core.errors import EngineError
from slime_sglang.external import NEW, OLD, common_dtype, common_features
from slime_sglang.server import Server

pytestmark = pytest.mark.unit


def servers(*facts):
    found = [Server.attach(f"http://{number}.example:1", number=number) for number in range(len(facts))]
    for server, said in zip(found, facts, strict=True):
        server.facts = said
    return found


def test_the_oldest_server_decides_what_is_asked_of_all():
    assert common_features([{"version": "0.5.23"}, {"version": "0.5.23"}]) == NEW
    assert common_features([{"version": "0.5.23"}, {"version": "0.5.12.post1"}]) == OLD
    with pytest.raises(EngineError, match="ENG71"):
        common_features([{"version": "0.5.23"}, {"version": "0.4.9"}])


def test_servers_of_different_dtypes_are_refused_by_name():
    """An update has one dtype."""
    assert common_dtype(servers({"dtype": "bfloat16"}, {"dtype": "bfloat16"}), "auto", None) == "bfloat16"
    with pytest.raises(EngineError, match="ENG86") as caught:
        common_dtype(servers({"dtype": "bfloat16"}, {"dtype": "float32"}), "auto", None)
    assert caught.value.where == "http://0.example:1: bfloat16, http://1.example:1: float32"
