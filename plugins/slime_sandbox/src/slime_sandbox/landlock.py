"""Landlock: the candidate's own list of what it may read and write, kept by the kernel whatever mounts say.

Rights and structures are those of linux/landlock.h; what a kernel does not know yet is left out, as its documentation
says.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

from slime_sandbox import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
EVERYTHING = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Rights by the ABI that brought them; 1 << 13 is renaming between folders, 1 << 14 truncation, 1 << 15 ioctl."""
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
READING = EXECUTE | READ_FILE | READ_DIR
TCP, SCOPES = 3, 3
"""Binding and connecting (ABI 4); abstract sockets and signals (ABI 6)."""
VERSION, PATH_BENEATH = 1, 1
KEEPS_SIGNALS = 6
"""ABI from which on signals do not leave a domain."""


def abi() -> int:
    """The kernel's version of Landlock. Raises `OSError` where it has none."""
    return kernel.call("landlock_create_ruleset", None, 0, VERSION)


def restrict(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str] = ()) -> None:
    """From now on, for good: read and run what lies in ``readable``, do anything in ``writable``, use ``devices``.

    What does not exist is left out. No TCP, and no signals to processes outside, where the kernel can see to it.
    """
    version = abi()
    handled = sum(bits for since, bits in EVERYTHING.items() if since <= version)
    words = (handled, TCP if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = kernel.call("landlock_create_ruleset", struct.pack("<QQQ", *words)[:size], size, 0)
    try:
        for paths, rights in ((readable, READING), (writable, handled), (devices, handled & OF_FILES & ~EXECUTE)):
            for path in paths:
                _allow(rules, path, rights & handled)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError, PermissionError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                rights &= OF_FILES
            rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, place), 12)
            kernel.call("landlock_add_rule", rules, PATH_BENEATH, rule, 0)
        finally:
            os.close(place)
