"""`[sglang.router]` and what slime sets: words of the router's command line, and what is refused with which way out."""

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError
from slime_sglang.installation import Installation
from slime_sglang.options import Option
from slime_sglang.router_options import OWN, options_of, router_arguments, uses_router

pytestmark = pytest.mark.unit

FLAGS = ("disable_retries", "disable_circuit_breaker", "disable_health_check", "pd_disaggregation", "mini_lb")
NUMBERS = {"request_timeout_secs": "int", "shutdown_grace_period_secs": "int", "cache_threshold": "float"}
LEVELS, POLICIES = ("debug", "info", "warn", "error"), ("cache_aware", "manual", "round_robin")


def option(name, **more):
    return Option(name=name, flag=f"--{name.replace('_', '-')}", **more)


def installation(*, router="0.3.2"):
    found = [option(name, kind="flag") for name in FLAGS]
    found += [option(name, type=kind) for name, kind in NUMBERS.items()]
    found += [
        option("log_level", choices=LEVELS),
        option("policy", choices=POLICIES),
        option("api_key"),
        option("port"),
    ]
    known = {each.name: each for each in found} if router else {}
    return Installation(
        python="/p/python",
        env={},
        version="0.5.23",
        options={},
        features=frozenset(),
        router=router,
        router_options=known,
    )


def config(*words):
    return load_config(None, ["--rollout-engine", "sglang", *words])


def test_slime_turns_off_what_would_do_things_twice_and_asks_for_a_longer_time_than_its_own():
    words = router_arguments(config("--rollout-request-timeout", "99.5"), installation(), paired=False)
    assert words == (
        "--disable-retries",
        "--disable-circuit-breaker",
        "--disable-health-check",
        "--request-timeout-secs",
        "160",
        "--shutdown-grace-period-secs",
        "1",
        "--log-level",
        "warn",
    )
    assert "--pd-disaggregation" in router_arguments(config(), installation(), paired=True)


def test_options_of_the_user_come_after_and_win():
    written = config("--sglang-router-policy", "manual", "--sglang-router-log-level", "info")
    words = router_arguments(written, installation(), paired=False)
    assert words[-4:] == ("--policy", "manual", "--log-level", "info")
    assert words.count("--log-level") == 1


@pytest.mark.parametrize(
    ("words", "code", "said", "fix"),
    [
        pytest.param(
            ["--sglang-router-polcy", "manual"], "CFG01", "SGLang's router 0.3.2 has no", "policy", id="name"
        ),
        pytest.param(["--sglang-router-policy", "manul"], "CFG03", "'manul' is not a choice", "manual", id="choice"),
        pytest.param(["--sglang-router-cache-threshold", "x"], "CFG02", "wrong type", "0.5", id="type"),
        pytest.param(["--sglang-router-disable-retries"], "CFG04", "set by slime", "max-retries", id="retries"),
        pytest.param(["--sglang-router-port", "1"], "CFG04", "set by slime", "loopback", id="port"),
        pytest.param(["--sglang-router-api-key", "k"], "CFG04", "set by slime", "draws a token", id="token"),
        pytest.param(["--sglang-router-ip", "h"], "CFG01", "has no option 'ip'", "slime chooses it", id="slime's own"),
        pytest.param(
            ["sglang.router=manual"], "CFG02", "sglang.router is not a table", "sglang-router-NAME", id="table"
        ),
    ],
)
def test_a_router_option_that_cannot_be_is_refused_with_the_way_out(words, code, said, fix):
    with pytest.raises(ConfigError) as caught:
        router_arguments(config(*words), installation(), paired=False)
    assert caught.value.code == code
    assert said in str(caught.value)
    assert fix in caught.value.fix


def test_a_router_that_is_not_installed_is_named_with_the_command_that_does_it():
    with pytest.raises(ConfigError, match="router is not installed") as caught:
        router_arguments(config(), installation(router=""), paired=False)
    assert "/p/python -m pip install sglang-router" in caught.value.fix


@pytest.mark.parametrize(
    ("asked", "servers", "installed", "paired", "chosen"),
    [
        ("auto", 2, "0.3.2", False, True),
        ("auto", 1, "0.3.2", False, False),
        ("auto", 2, "", False, False),
        ("auto", 0, "0.3.2", False, False),  # servers of others
        ("auto", 2, "", True, True),  # and then it is missing, which is said
        ("sglang", 1, "", False, True),
        ("sglang", 0, "", False, True),
        ("builtin", 9, "0.3.2", False, False),
    ],
)
def test_the_router_is_chosen_by_servers_installation_and_disaggregation(asked, servers, installed, paired, chosen):
    found = uses_router(config("--rollout-router", asked), servers=servers, installed=installed, paired=paired)
    assert found is chosen


def test_slimes_own_router_takes_no_pairs():
    with pytest.raises(ConfigError, match="two that are paired"):
        uses_router(config("--rollout-router", "builtin"), servers=2, installed="0.3.2", paired=True)


def test_options_are_listed_once_each():
    assert set(OWN) >= set(FLAGS)
    assert options_of(installation())["policy"].choices == POLICIES
