"""Where a server is reached, and with which token: one small value that every room of the engine shares."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server as its clients see it; the token shows in no repr.

    Example: ServerAddress(url="http://127.0.0.1:30000", token=token, number=0)
    """

    url: str  # scheme, host and port, without a slash at its end
    token: str = field(repr=False, default="")
    ca: str = ""  # PEM file of authorities, for https; empty: those that Python trusts by itself
    number: int = 0  # of the server in the run
    group: str = "rollout"  # of the topology
    generation: int = 1  # rises at each restart: what an older one answers is not heard any more
