"""A folder of a service's own, its token and its socket.

FOLDER/   token (mode 0600)   lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.sections.rollout import is_loopback
from slime_core.durable import storage_error
from slime_core.errors import ConfigError, StorageError

SHORTEST = 16  # characters of a token
CONNECTIONS = 1024  # that wait to be accepted


@dataclass(slots=True, frozen=True, kw_only=True)
class Address:
    """Where one service lives."""

    folder: Path
    token_env: str  # the variable that may hold the token
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    token_file: Path | None = None


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
        raise storage_error(error, folder, "the service's folder cannot be used") from error
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


def find_token(address: Address) -> tuple[str, Path | None]:
    """The token and the file that holds it: the given file's, the environment's, the folder's, or a new one there.

    Raises:
        ConfigError: CFG02 too short, CFG04 a file that others can read; or the host is not the loopback and no file
            was given. CFG05 the file does not exist.
    """
    if address.token_file is not None:
        return _read_token(address.token_file), address.token_file
    if not is_loopback(address.host):
        raise ConfigError(
            f"{address.host} can be reached from other machines",
            code="CFG04",
            where="--host",
            why="requests and the token travel in clear text; a token made on the spot is for this machine alone",
            fix="leave --host out, or give a token of your own: --token-file FILE (mode 0600), behind a TLS proxy",
        )
    if token := os.environ.get(address.token_env):
        return _sound(token, address.token_env), None
    path = address.folder / "token"
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(descriptor)
    return _read_token(path), path


def bind(address: Address) -> socket.socket:
    """A listening socket, bound here and held, so that the port cannot be lost before it is served.

    Raises:
        ConfigError: CFG04 the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"{address.host}:{address.port} cannot be served: {error.strerror or error}",
            code="CFG04",
            where="--host, --port",
            fix="leave --port out to take a free one",
        ) from error


def url_of(listening: socket.socket) -> str:
    """``http://HOST:PORT`` of a listening socket."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


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
            f"the token is not a word of at least {SHORTEST} printable characters",
            code="CFG02",
            where=where,
            fix="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token
