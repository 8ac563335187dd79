"""The options that slime gives, as sglang-router 0.3.2 declares them; ``--behave`` is the stand-in's own."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace


class RouterArgs(SimpleNamespace):
    """What was asked for, and the token."""

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--host", default="0.0.0.0", help="Where to listen")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--prometheus-host")
        parser.add_argument("--prometheus-port", type=int, default=29000)
        parser.add_argument("--policy", default="cache_aware", choices=["cache_aware", "manual", "round_robin"])
        parser.add_argument("--cache-threshold", type=float, default=0.3)
        parser.add_argument("--log-level", default="info", choices=["debug", "info", "warn", "error"])
        for name in ("disable-retries", "disable-circuit-breaker", "disable-health-check", "pd-disaggregation"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--request-timeout-secs", type=int, default=1800)
        parser.add_argument("--shutdown-grace-period-secs", type=int, default=180)
        parser.add_argument("--api-key")
        parser.add_argument("--behave", default="")

    @classmethod
    def from_cli_args(cls, args: Namespace) -> RouterArgs:
        """As the original."""
        return cls(**vars(args))
