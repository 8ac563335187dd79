"""How SGLang's server and router are launched: ports that they would only guess are held and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_sglang.held_ports import Hold, hold
from slime_sglang.host import Launch

ATTENTION_PORTS = 16
"""Ports that SGLang counts upwards from --dist-init-addr with data-parallel attention."""
LAUNCHER = "slime_sglang.launcher"
CRASH = r"Subprocess (\S+) \(pid=(\d+)\) crashed with exit code (-?\d+)"
"""SGLang's line about a scheduler that ended."""
HIGHEST = 55_535
"""Of a server's port: SGLang 0.5.12 makes its gRPC port of it, 10,000 above, and refuses one that is none."""


def server_launch(**fields: Any) -> Launch:
    """How a server is started: a `Launch` of these fields."""
    return Launch(**{"launcher": LAUNCHER, "hold": of_server, "crash": CRASH, **fields})


def router_launch(**fields: Any) -> Launch:
    """How SGLang's router is started: a `Launch` of these fields."""
    return Launch(**{"launcher": LAUNCHER, "hold": of_router, "program": "router", **fields})


def of_server(launch: Launch) -> tuple[list[Hold], list[str]]:
    """Ports of a server, held, that of HTTP first, and the words that name the others."""
    first = hold(launch.address, highest=HIGHEST)
    others = further(launch.arguments, launch.address)
    return [first, *(hold_of for hold_of, _ in others)], [word for _, words in others for word in words]


def of_router(launch: Launch) -> tuple[list[Hold], list[str]]:
    """Ports of SGLang's router, held: that of HTTP and that of its metrics, with the words that name the latter."""
    holds = [hold(launch.address)]
    if "--prometheus-port" in launch.arguments:
        return holds, []
    holds.append(hold(launch.address))
    named = [] if "--prometheus-host" in launch.arguments else ["--prometheus-host", launch.address]
    return holds, [*named, "--prometheus-port", str(holds[1].port)]


def further(arguments: Sequence[str], host: str) -> list[tuple[Hold, list[str]]]:
    """Ports beside that of HTTP that SGLang would only guess, held, each with the words that name it."""
    if option(arguments, "--nnodes", "1") != "1":
        return []  # the user names the rendezvous of several machines
    ports = []
    attention = "--enable-dp-attention" in arguments
    if attention and not option(arguments, "--dist-init-addr"):
        hold_now = hold(count=ATTENTION_PORTS)
        ports.append((hold_now, ["--dist-init-addr", f"127.0.0.1:{hold_now.port}"]))
    # data-parallel workers without common attention take one port each, and refuse a common one
    ranks = option(arguments, "--dp-size", option(arguments, "--data-parallel-size", "1"))
    if (attention or ranks == "1") and not option(arguments, "--nccl-port"):
        hold_now = hold()
        ports.append((hold_now, ["--nccl-port", str(hold_now.port)]))
    if option(arguments, "--disaggregation-mode") == "prefill":
        hold_now = hold(host)
        ports.append((hold_now, ["--disaggregation-bootstrap-port", str(hold_now.port)]))
    return ports


def option(arguments: Sequence[str], name: str, default: str = "") -> str:
    """The value of an option in SGLang's command line, as ``NAME VALUE`` or ``NAME=VALUE``."""
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return default
