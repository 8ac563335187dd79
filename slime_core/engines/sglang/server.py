"""One SGLang server: started and stopped by us, or another's that runs already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slime_core.engines.sglang.address import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server of ours is started; host, port, further ports and the token are added by `Server`.

    Example: Launch(python=installation.python, arguments=("--model-path", path), env={}, log=run / "log/engine-0.log")
    """

    python: str  # of SGLang's environment
    arguments: tuple[str, ...]  # of SGLang's command line
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to ours
    host: str = "127.0.0.1"
    threads: int = 1  # OMP_NUM_THREADS where ``env`` has none


class Server:
    """A server of ours (``launch``) or another's (``attach``).

    Example:
        server = Server.launch(Launch(...), number=0)
        await server.start()
        await server.ready(900.0)
        ...
        await server.stop()
    """

    address: Address  # of its present generation: every start has its own port and the next generation
    log: Path | None

    @classmethod
    def launch(cls, launch: Launch, *, number: int = 0, group: str = "rollout") -> Self:
        """A server of ours, not started; its token is drawn here."""
        raise NotImplementedError

    @classmethod
    def attach(cls, url: str, *, token: str = "", number: int = 0, group: str = "rollout") -> Self:
        """A server that somebody else runs: never started and never stopped by us."""
        raise NotImplementedError

    @property
    def owned(self) -> bool:
        """Whether we started it, and may stop it."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Of the launcher; 0 where nothing of ours runs."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process, a new generation of ``address``; a no-op for another's server.

        Raises:
            EngineError: ENG69 where no process can be started.
        """
        raise NotImplementedError

    async def ready(self, timeout: float) -> None:
        """Wait until it serves.

        Raises:
            EngineError: ENG69 it does not answer in ``timeout`` seconds, or ended; ENG71 another service answers there;
                ENG73 it refuses the token.
        """
        raise NotImplementedError

    async def died(self) -> str:
        """Wait until its process ends, and say how, as the end of a sentence; for another's server, wait forever."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all its processes and wait until none is left; a no-op where none runs, and for another's server."""
        raise NotImplementedError

    def tail(self) -> str:
        """The last lines of its log, without the token and without lines of more than a few hundred characters."""
        raise NotImplementedError
