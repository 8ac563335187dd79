"""The key that a judge's inputs are drawn from: kept beside a run, so that the same run asks the same again.

    key, what it is for, problem, candidate -> HMAC-SHA256 -> a number

Who lacks the key can foretell no number, and no number tells of another. The key is in no log, message or record, and
what a sandbox shows to candidates has no part of a run directory.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
from pathlib import Path

from slime_core.durable import storage_error

FILE = Path("kernelbench") / "secret"
"""In a run directory."""
_BYTES = 32


class Secret:
    """A key, and numbers that are drawn from it.

    Example:
        secret = Secret.load_or_create(run_dir / FILE)
        seed = secret.number("inputs", problem.source, bits=48)     # the same whenever the run asks
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes = b"") -> None:
        """Without a key, a new one."""
        self._key = key or secrets.token_bytes(_BYTES)

    @classmethod
    def load_or_create(cls, path: Path) -> Secret:
        """The key in the file ``path``, or a new one that is put there, for its owner alone (mode 0600).

        Raises:
            StorageError: STO00, 109, 110, 111, 120 or 121: it cannot be kept or read, or is none.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _put(path)
            key = path.read_bytes()
            if len(key) != _BYTES:
                raise OSError(errno.EINVAL, f"{len(key)} bytes are no key of {_BYTES}", str(path))
        except OSError as error:
            raise storage_error(error, path, "the key of the judge's inputs cannot be kept") from error
        return cls(key)

    @property
    def text(self) -> str:
        """For a worker of one's own, over a socket that nobody else has."""
        return self._key.hex()

    def number(self, purpose: str, *about: str, bits: int = 32) -> int:
        """A number of so many bits (at most 256), by what it is for and about."""
        message = b"".join(
            len(part).to_bytes(8, "big") + part
            for part in (text.encode(errors="surrogatepass") for text in (purpose, *about))
        )
        return int.from_bytes(hmac.digest(self._key, message, "sha256"), "big") >> (256 - bits)


def _put(path: Path) -> None:
    """A new key, under another name first: one that is there is whole. The folder has one process at a time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
        file.flush()
        os.fsync(descriptor)
    os.replace(temporary, path)
