"""See the package."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass
class ServerArgs:
    """Its dump goes to the log, as SGLang's does."""

    host: str
    port: int
    nccl_port: int
    dist_init_addr: str
    dp_size: int
    enable_dp_attention: bool
    behave: str
    gate: str
    loads: int
    api_key: str | None = None


def prepare_server_args(argv: list[str]) -> ServerArgs:
    """Command line to arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--nccl-port", type=int, default=0)
    parser.add_argument("--dist-init-addr", default="")
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--behave", default="")
    parser.add_argument("--gate", default="")
    parser.add_argument("--loads", type=int, default=0)
    return ServerArgs(**vars(parser.parse_args(argv)))
