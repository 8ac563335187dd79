"""`slime.backends.sglang_utils.server_control`."""

from __future__ import annotations

from collections.abc import Sequence


async def abort_servers_until_idle(urls: Sequence[str]) -> None:
    """Leave requests alone: a request that the run's engine works at ends by itself."""


__all__ = ["abort_servers_until_idle"]
