"""See the package."""

from __future__ import annotations

import argparse
from types import SimpleNamespace


class ServerArgs(SimpleNamespace):
    """Its dump goes to the log, as SGLang's does."""


def prepare_server_args(argv: list[str]) -> ServerArgs:
    """Command line to arguments."""
    parser = argparse.ArgumentParser()
    defaults = {"host": "127.0.0.1", "port": 30000, "nccl-port": 0, "dist-init-addr": "", "dp-size": 1, "loads": 0}
    for name, default in {**defaults, "behave": "", "gate": ""}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--enable-dp-attention", action="store_true")
    return ServerArgs(**vars(parser.parse_args(argv)), api_key=None)
