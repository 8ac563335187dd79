"""A folder in, a running service out: lock, token, socket, signals. `slime buffer serve` is a door to this.

FOLDER/   ledger.sqlite segments/ (an ordinary ledger)   service.sqlite   token (mode 0600)   lock
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_core.addresses import is_loopback
from slime_core.buffer.service.tables import Limits
from slime_core.durable import storage_error
from slime_core.errors import ConfigError, StorageError
from slime_core.extras import install_line

TOKEN_ENV = "SLIME_BUFFER_TOKEN"
SHORTEST = 16  # characters of a token
HEAD_BYTES = 16 << 10  # request line and headers
CONNECTIONS = 1024
GRACE = 5  # seconds for requests under way when the service ends


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings:
    """How one service runs."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    token_file: Path | None = None
    token_env: str = TOKEN_ENV  # the variable that may hold the token
    max_body: int = 16 << 20  # bytes
    max_tokens: int = 131072  # of a sequence
    limits: Limits = field(default_factory=Limits)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold it; the kernel lets go when this process ends, however it ends.

    Raises:
        StorageError: STO116 another service has it, STO110 it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise storage_error(error, folder, "the buffer's folder cannot be used") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another service has {folder}",
                code="STO116",
                where=str(folder / "lock"),
                fix="stop it, or serve another folder",
            ) from None
        yield


def find_token(settings: Settings) -> tuple[str, Path | None]:
    """The token and the file that holds it: the given file's, the environment's, the folder's, or a new one there.

    Raises:
        ConfigError: CFG02 too short, CFG04 a file that others can read; or the host is not the loopback and no file
            was given. CFG05 the file does not exist.
    """
    if settings.token_file is not None:
        return _read_token(settings.token_file), settings.token_file
    if not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines",
            code="CFG04",
            where="--host",
            why="requests and the token travel in clear text; a token made on the spot is for this machine alone",
            fix="leave --host out, or give a token of your own: --token-file FILE (mode 0600), behind a TLS proxy",
        )
    if given := os.environ.get(settings.token_env):
        return _sound(given, settings.token_env), None
    path = settings.folder / "token"
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(descriptor)
    return _read_token(path), path


def bind(settings: Settings) -> socket.socket:
    """A listening socket, bound here and held, so that the port cannot be lost before it is served.

    Raises:
        ConfigError: CFG04 the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be served: {error.strerror or error}",
            code="CFG04",
            where="--host, --port",
            fix="leave --port out to take a free one",
        ) from error


def serve(settings: Settings, started: Callable[[str, Path | None], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``started`` gets the URL and the token's file when requests are answered.

    Raises:
        ConfigError: FastAPI or uvicorn is not installed; or as :func:`find_token` and :func:`bind`.
        StorageError: the folder is another service's, or damaged.
    """
    require_packages()
    with locked(settings.folder):
        token, path = find_token(settings)
        listening = bind(settings)
        with listening:
            asyncio.run(_serve(settings, token, listening, lambda url: started(url, path)))


async def _serve(settings: Settings, token: str, listening: socket.socket, started: Callable[[str], None]) -> None:
    import uvicorn

    from slime_core.buffer.service.app import make_app
    from slime_core.buffer.service.desk import Desk
    from slime_core.buffer.service.heads import timely

    class Server(uvicorn.Server):
        """Ours to stop: uvicorn's own handlers would raise the signal again when it has ended."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started(_url(listening))

    desk = Desk(settings.folder, settings.limits)
    try:
        app = make_app(desk, token=token, max_body=settings.max_body, max_tokens=settings.max_tokens)
        config = uvicorn.Config(
            app,
            http=timely(),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE,
        )
        server = Server(config)

        def stop() -> None:
            server.should_exit = True
            desk.stop_waiting()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listening])
    finally:
        await desk.close()


def require_packages() -> None:
    """Raises ConfigError CFG04 where the extra `serve` is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "httpx") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the rollout buffer needs {', '.join(missing)}",
            code="CFG04",
            where="slime buffer",
            why="the extra `serve` is not installed",
            fix=install_line("serve"),
        )


def _read_token(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the token cannot be read: {error}",
            code="CFG05",
            where=str(path),
            fix="write a line of random letters there, mode 0600",
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"others may read the token ({stat.S_IMODE(mode):o})",
            code="CFG04",
            where=str(path),
            fix=f"chmod 600 {path}",
        )
    return _sound(text, str(path))


def _sound(token: str, where: str) -> str:
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token is no word of at least {SHORTEST} printable characters",
            code="CFG02",
            where=where,
            fix="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
