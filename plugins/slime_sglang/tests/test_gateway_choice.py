"""Servers that are ready in, SGLang's router before them or none out; nothing is started here."""

import asyncio

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError, EngineError
from slime_sglang import start_gateway as gateways
from slime_sglang.installation import Installation
from slime_sglang.options import Option
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

pytestmark = pytest.mark.unit

KNOWN = {"policy": Option(name="policy", flag="--policy", choices=("cache_aware", "manual"))}


def servers(tmp_path, *modes, owned=True, token=""):
    found = []
    for number, mode in enumerate(modes):
        launch = server_launch(python="python", arguments=(), log=tmp_path / f"{number}.log")
        one = Server.launch(launch, number=number, token=token) if owned else Server.attach(f"http://h:{number + 1}")
        one.facts = {"disaggregation_mode": mode}
        found.append(one)
    if not owned:
        for number, one in enumerate(found):
            one.address = one.address.__class__(url=one.address.url, number=number)
    return found


def installation(router="0.3.2"):
    options = KNOWN if router else {}
    return Installation(
        python="/p/python",
        env={"A": "1"},
        version="0.5.23",
        options={},
        features=frozenset(),
        router=router,
        router_options=options,
    )


def choose(tmp_path, found, installed, *flags, role="policy"):
    config = load_config(None, ["--rollout-engine", "sglang", *flags])
    notes = []

    async def work():
        return await gateways.gateway(config, found, installed, role=role, run_dir=tmp_path, note=notes.append)

    return asyncio.run(work()), notes


def test_several_servers_of_ours_have_sglangs_router_where_it_is_installed_and_the_run_says_so(tmp_path):
    made, (note,) = choose(tmp_path, servers(tmp_path, "null", "null"), installation())
    assert made is not None
    assert made.process.log == tmp_path / "log" / "gateway.log"
    assert "SGLang's router 0.3.2, policy cache_aware" in note
    made, (note,) = choose(
        tmp_path, servers(tmp_path, None, None), installation(), "--sglang-router-policy", "manual", role="judge"
    )
    assert made.process.log.name == "gateway-judge.log"
    assert "of judge" in note
    assert "policy manual" in note


@pytest.mark.parametrize(
    ("modes", "installed", "flags"),
    [
        (("null",), "0.3.2", ()),
        (("null", "null"), "", ()),
        (("null", "null"), "0.3.2", ("--rollout-router", "builtin")),
    ],
)
def test_otherwise_slime_spreads_requests_itself(tmp_path, modes, installed, flags):
    assert choose(tmp_path, servers(tmp_path, *modes), installation(installed), *flags) == (None, [])


def test_a_pair_shares_the_routers_token_and_others_do_not(tmp_path):
    made, _ = choose(tmp_path, servers(tmp_path, "prefill", "decode", token="theirs"), installation())
    assert made.address.token == "theirs"
    made, _ = choose(tmp_path, servers(tmp_path, "null", "null", token="theirs"), installation())
    assert made.address.token not in ("", "theirs")
    assert gateways.one_token({"prefill"})
    assert not gateways.one_token({"regular"})


def test_a_pair_without_sglangs_router_is_refused(tmp_path):
    found = servers(tmp_path, "prefill", "decode")
    with pytest.raises(ConfigError, match="router is not installed"):
        choose(tmp_path, found, installation(""))
    with pytest.raises(ConfigError, match="two that are paired"):
        choose(tmp_path, found, installation(), "--rollout-router", "builtin")


def test_kinds_that_serve_nothing_together_are_refused(tmp_path):
    for modes in (("null", "prefill"), ("decode",), ("prefill", "prefill")):
        with pytest.raises(EngineError, match="cannot serve one model together") as caught:
            gateways.kinds(servers(tmp_path, *modes, owned=False))
        assert caught.value.code == "ENG86"
        assert "http://h:1" in caught.value.where
    found = gateways.kinds(servers(tmp_path, "prefill", "decode", "decode"))
    assert gateways.pairs(found) == [frozenset({1, 2}), frozenset({0})]
    assert gateways.pairs(gateways.kinds(servers(tmp_path, "null", None))) == []
