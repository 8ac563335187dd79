"""slime's ``args``: a namespace over a run's flat keys, which functions may change for the functions after them."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import nearest
from slime_core.notices import notice
from slime_core.plugins.backends import COMPAT, is_installed

if TYPE_CHECKING:
    import asyncio

    from slime_core.context import Context

LOOPBACK = "127.0.0.1"
ADDRESS = ("sglang_router_ip", "sglang_router_port")
LIVE = (*ADDRESS, "rank", "local_rank", "save")
"""Read when they are asked for, unless a function has set them."""


class Loopback(Protocol):
    """What has the loopback `/generate` of a run."""

    loop: asyncio.AbstractEventLoop | None

    def server(self) -> Any:
        """The server; ``port(ctx)`` opens it at its first call."""
        ...


class Args(Namespace):
    """A copy of slime's args, for the function that made it. ``vars(args)`` are all keys but those of ``LIVE``.

    ``sglang_router_ip`` and ``sglang_router_port`` lead to a loopback `/generate` before the run's engine, opened when
    they are first read; a pickled namespace has them as numbers.

    Example:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    """

    __slots__ = ("_ctx", "_session")

    def __init__(self, values: dict[str, Any], session: Loopback | None = None, ctx: Context | None = None) -> None:
        for name, value in (("__dict__", values), ("_session", session), ("_ctx", ctx)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in LIVE and self._session is not None:
            return self._live(name)
        hint = "" if name.startswith("__") else nearest(name, tuple(vars(self)))
        raise AttributeError(f"args has no '{name}'; {hint + ' ' if hint else ''}all keys: slime config keys")

    def _live(self, name: str) -> Any:
        if name in ADDRESS:
            server = self._session.server()
            return LOOPBACK if name == "sglang_router_ip" else server.port(self._ctx, self._session.loop)
        if name == "save":
            return str(self._ctx.run_dir) if self._ctx and self._ctx.run_dir else None
        rank = _rank()
        return rank if name == "rank" else rank % self.actor_num_gpus_per_node

    def __contains__(self, name: object) -> bool:
        return name in vars(self) or name in LIVE

    def __copy__(self) -> Args:
        return Args(dict(vars(self)), self._session, self._ctx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Args:
        return Args(copy.deepcopy(vars(self), memo), self._session, self._ctx)

    def __reduce__(self) -> tuple[Any, ...]:
        live = [name for name in LIVE if name not in ADDRESS or is_installed(COMPAT)]
        return Args, ({name: getattr(self, name) for name in live if name in self} | vars(self),)


class SharedArgs(Args):
    """The args of a run. What a function sets, every function after it sees, in this process; the config does not."""

    __slots__ = ("_write",)

    def __init__(
        self, values: dict[str, Any], session: Loopback, ctx: Context | None, write: Callable[[str, Any], None]
    ) -> None:
        super().__init__(values, session, ctx)
        object.__setattr__(self, "_write", write)

    def __setattr__(self, name: str, value: Any) -> None:
        code = sys._getframe(1).f_code
        place = f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        text = f"{place} sets args.{name}: functions after it see it, the run's own config stays as it is"
        notice(("args", name, place), text)
        self._write(name, value)


def _rank() -> int:
    """This process's rank in the trainer; 0 elsewhere."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed.get_rank() if distributed and distributed.is_initialized() else 0
