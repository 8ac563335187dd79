"""Servers that others run, several at once: what all of them can do, and what they must have in common."""

from types import SimpleNamespace

import pytest

from slime_core.config.schema import Config
from slime_core.errors import ConfigError, EngineError
from slime_sglang.external import NEW, OLD, common_dtype, common_features
from slime_sglang.server import Server
from slime_sglang.start import routed_experts

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


@pytest.mark.parametrize(
    ("kind", "experts", "started", "paired", "problem"),
    [
        ("off", 8, False, False, None),
        ("rollout", 8, True, False, None),
        ("rollout", 8, False, False, "started without --enable-return-routed-experts: http://h:1"),
        ("rollout", 8, True, True, "a decode server does not know the experts"),
        ("rollout", 0, True, False, "the model has no experts"),
    ],
    ids=["not replayed", "replayed", "of servers that keep none", "of pairs", "of a dense model"],
)
def test_experts_are_replayed_of_servers_that_say_them(kind, experts, started, paired, problem):
    text = SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=experts)
    folder = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    facts = {"enable_return_routed_experts": started}
    others = [SimpleNamespace(facts=facts, owned=False, address=SimpleNamespace(url="http://h:1"))]
    config = Config.model_validate({"train": {"routing_replay": kind}})
    if problem is None:
        expected = (3, 8) if kind == "rollout" else None
        assert routed_experts(config, folder, others, paired=paired) == expected
        return
    with pytest.raises(ConfigError) as error:
        routed_experts(config, folder, others, paired=paired)
    assert problem in error.value.why
