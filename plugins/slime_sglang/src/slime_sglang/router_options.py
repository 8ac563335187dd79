"""Options of SGLang's router: what slime sets by itself, and a run's `[sglang.router]` as words of its command line.

Like a server's options they are read from the installed package's own parser (`probe.py`), and checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_sglang import options
from slime_sglang.options import ADDRESS, PLAIN, TOKEN, Option, OptionFamily, Place

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_sglang.installation import Installation

KEY = "rollout.rollout_router"
AGAIN = "leave it out: slime retries by itself, where a retry is safe (--rollout-max-retries N)"
WATCHED = (
    "leave it out: slime monitors the servers and registers them with the router (--rollout-health-check-timeout S)"
)
BUSY = "--server-concurrency N: requests wait in slime, in order"
MEMBERS = "leave it out: slime registers the servers of --engine-topology FILE with the router"
HTTP = "leave it out: slime speaks SGLang's /generate"
AUTH = "leave it out: one token, drawn by slime, opens the router"

OWN: Mapping[str, str] = {
    **dict.fromkeys(("host", "port"), "slime chooses it, on the loopback; leave it out"),
    **dict.fromkeys(("worker_urls", "prefill", "decode", "mini_lb"), MEMBERS),
    **dict.fromkeys(("service_discovery", "selector", "prefill_selector", "decode_selector"), MEMBERS),
    **dict.fromkeys(("service_discovery_port", "service_discovery_namespace"), MEMBERS),
    **dict.fromkeys(
        ("worker_startup_timeout_secs", "worker_startup_check_interval"), "--rollout-start-timeout SECONDS"
    ),
    "pd_disaggregation": "mode of a [[group]] in --engine-topology FILE: prefill and decode",
    "api_key": TOKEN,
    **dict.fromkeys(("control_plane_api_keys", "control_plane_audit_enabled"), AUTH),
    **dict.fromkeys(("jwt_issuer", "jwt_audience", "jwt_jwks_uri", "jwt_role_mapping"), AUTH),
    "request_timeout_secs": "--rollout-request-timeout SECONDS",
    "shutdown_grace_period_secs": "leave it out: slime ends the router when nothing waits for it",
    **dict.fromkeys(("disable_retries", "retry_max_retries", "retry_backoff_multiplier"), AGAIN),
    **dict.fromkeys(("retry_initial_backoff_ms", "retry_max_backoff_ms", "retry_jitter_factor"), AGAIN),
    **dict.fromkeys(("disable_circuit_breaker", "cb_failure_threshold", "cb_success_threshold"), WATCHED),
    **dict.fromkeys(("cb_timeout_duration_secs", "cb_window_duration_secs", "disable_health_check"), WATCHED),
    **dict.fromkeys(("health_failure_threshold", "health_success_threshold", "health_check_timeout_secs"), WATCHED),
    **dict.fromkeys(("health_check_interval_secs", "health_check_endpoint"), WATCHED),
    **dict.fromkeys(("max_concurrent_requests", "queue_size", "queue_timeout_secs"), BUSY),
    "rate_limit_tokens_per_second": BUSY,
    "dp_aware": "leave it out: a server spreads requests over its data-parallel ranks by itself",
    "enable_igw": "leave it out: each model of a run has its own router",
    **dict.fromkeys(("backend", "history_backend"), HTTP),
    **dict.fromkeys(("tls_cert_path", "tls_key_path"), PLAIN),
    **dict.fromkeys(("client_cert_path", "client_key_path", "ca_cert_paths"), "http:// addresses: see rollout_router"),
}
"""Options that slime sets by itself, or that would break it: name -> what to write in their place."""

ELSEWHERE: Mapping[str, str] = {"ip": ADDRESS, "request_timeout": "--rollout-request-timeout SECONDS"}

ROUTER = OptionFamily(
    title="SGLang's router",
    genitive="SGLang's router's",
    flags="--sglang-router-",
    fixed=OWN,
    elsewhere=ELSEWHERE,
)


def table_of(config: Config) -> Mapping[str, Any]:
    """`[sglang.router]`.

    Raises:
        ConfigError: CFG02 it is no table.
    """
    table = config.table("sglang").get("router", {})
    if not isinstance(table, Mapping):
        fix = "--sglang-router-NAME VALUE   or   a table [sglang.router]"
        raise ConfigError("sglang.router is not a table", code="CFG02", where="sglang.router", fix=fix)
    return table


def router_arguments(
    config: Config, installation: Installation, *, paired: bool, where: str | Place = "sglang.router"
) -> tuple[str, ...]:
    """Words of the router's command line but host, ports and token; ``paired`` for prefill and decode servers.

    Raises:
        ConfigError: CFG04 no router is installed beside SGLang; others as `options.arguments`.
    """
    available = installation.router_options
    if not available:
        raise missing(installation)
    written = {name.replace("-", "_"): value for name, value in table_of(config).items()}
    defaults = {
        name: value
        for name, value in _fixed_options(config, paired).items()
        if name in available and name not in written
    }
    words = options.arguments(available, defaults, by_slime=True, family=ROUTER)
    words += options.arguments(available, table_of(config), version=installation.router, where=where, family=ROUTER)
    return tuple(words)


def missing(installation: Installation) -> ConfigError:
    """The error for a run that needs the router where it is not installed."""
    return ConfigError(
        "SGLang's router is not installed",
        code="CFG04",
        where=KEY,
        why=f"{installation.python} has SGLang {installation.version} and no sglang-router",
        fix=f"{installation.python} -m pip install sglang-router   or   --rollout-router builtin",
    )


def _fixed_options(config: Config, paired: bool) -> dict[str, Any]:
    """What slime sets, by the router's names."""
    options: dict[str, Any] = {
        "disable_retries": True,  # a try may be running still; `calls` knows when it is over
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "request_timeout_secs": math.ceil(config.rollout.rollout_request_timeout) + 60,  # ours is the first to end
        "shutdown_grace_period_secs": 1,
        "log_level": "warn",  # at info it writes two lines a request
        "balance_abs_threshold": 8,  # requests that a server may have more, for a prefix: all prompts may begin alike
        "balance_rel_threshold": 1.1,
    }
    return options | ({"pd_disaggregation": True} if paired else {})


def options_of(installation: Installation) -> dict[str, Option]:
    """Every option of the router by its first name."""
    return {option.name: option for option in installation.router_options.values()}


def uses_router(config: Config, *, servers: int, installed: str, paired: bool) -> bool:
    """Whether SGLang's router spreads the requests of a model.

    Args:
        config: of the run.
        servers: of ours that serve the model.
        installed: its version beside SGLang; empty where there is none.
        paired: whether they are prefill and decode servers.

    Raises:
        ConfigError: CFG04 ``builtin`` with prefill and decode servers.
    """
    router = config.rollout.rollout_router
    if paired and router == "builtin":
        raise ConfigError(
            "rollout_router = builtin with prefill and decode servers",
            code="CFG04",
            where=KEY,
            why="slime's own router sends a request to one server, and theirs need two that are paired",
            fix="--rollout-router sglang",
        )
    return paired or router == "sglang" or (router == "auto" and servers > 1 and bool(installed))
