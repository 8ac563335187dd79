"""The candidate's system-call filter: hand-assembled BPF, installed through ctypes; the listener that counts denials.

    architecture is not ours -> kill;  number unknown -> ENOSYS;  in a table -> its rule;  everything else -> allow

A counted call stops until the warden has seen it and answered: EPERM, or, for calls that open files, "let the kernel
decide". The layout of `struct seccomp_data` and of a BPF instruction is that of seccomp(2) and linux/filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from slime_sandbox import kernel
from slime_sandbox.syscalls import (
    COUNTED,
    GROUPS,
    HIDDEN,
    JUDGED,
    LAST,
    MEMORY_FILES,
    OF_DRIVERS,
    OPENS,
    QUIET,
    Table,
)

LD, JEQ, JGT, JSET, AND, RET = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
ALLOW, KILL, NOTIFY, ERRNO = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000
NR, ARCH, ARGUMENTS = 0, 4, 16
AUDIT = (0xC000003E, 0xC00000B7)
SET_MODE_FILTER, SPEC_ALLOW, NEW_LISTENER, WAIT_KILLABLE = 1, 4, 8, 32
CLONE_NEW = 0x7E020000 | 0x80
"""Every flag of clone that makes a namespace. 0x80, that of time, cannot be had by ``clone``."""
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET = 1, 1, 5
TIOCSTI, TIOCLINUX, PR_SET_SECCOMP = 0x5412, 0x541C, 22


@dataclass(slots=True, frozen=True, kw_only=True)
class Rules:
    """What of the filter depends on the other layers."""

    memory_files: bool  # something counts them
    own_groups: bool  # a candidate may leave its process group
    signals_within: int = 0  # only to this process and its group; 0: another layer sees to it
    gpu: bool = False  # CUDA's driver has a local socket of its own, and starts nowhere without it


Instruction = bytes


def _do(code: int, value: int, true: int = 0, false: int = 0) -> Instruction:
    return struct.pack("<HBBI", code, true, false, value)


def _low(argument: int) -> Instruction:
    return _do(LD, ARGUMENTS + 8 * argument)


def _high(argument: int) -> Instruction:
    return _do(LD, ARGUMENTS + 8 * argument + 4)


def program(architecture: int, rules: Rules) -> bytes:
    """The filter for an architecture's index."""
    code = [_do(LD, ARCH), _do(JEQ, AUDIT[architecture], 1, 0), _do(RET, KILL), _do(LD, NR)]
    code += [_do(JGT, LAST, 0, 1), _do(RET, ERRNO | errno.ENOSYS)]
    counted = {name: pair for name, pair in COUNTED.items() if not (rules.gpu and name in OF_DRIVERS)}
    tables: list[tuple[Table, int]] = [(counted, NOTIFY), (OPENS, NOTIFY), (QUIET, ERRNO | errno.EPERM)]
    tables.append((HIDDEN, ERRNO | errno.ENOSYS))
    tables += [] if rules.memory_files else [(MEMORY_FILES, ERRNO | errno.EPERM)]
    tables += [] if rules.own_groups else [(GROUPS, ERRNO | errno.EPERM)]
    for table, action in tables:
        for pair in table.values():
            code += _when(pair[architecture], [_do(RET, action)])
    for name, body in _judged(rules).items():
        code += _when(JUDGED[name][architecture], body)
    return b"".join([*code, _do(RET, ALLOW)])


def _when(number: int | None, body: Iterable[Instruction]) -> list[Instruction]:
    """``body``, which returns on all paths, for that call alone."""
    body = list(body)
    return [] if number is None else [_do(JEQ, number, 0, len(body)), *body]


def _judged(rules: Rules) -> dict[str, list[Instruction]]:
    notify, allow = _do(RET, NOTIFY), _do(RET, ALLOW)
    bodies = {
        "clone": [_low(0), _do(JSET, CLONE_NEW & ~0x80, 0, 1), notify, allow],
        "socket": _socket(rules.gpu),
        "socketpair": [  # datagrams could be sent to the address of another
            *(_low(0), _do(JEQ, AF_UNIX, 0, 5)),
            *(_low(1), _do(AND, 0xF), _do(JEQ, SOCK_STREAM, 1, 0), _do(JEQ, SOCK_SEQPACKET, 0, 1)),
            *(allow, notify),
        ],
        "sendto": [_low(4), _do(JEQ, 0, 0, 3), _high(4), _do(JEQ, 0, 0, 1), allow, notify],
        "ioctl": [_low(1), _do(JEQ, TIOCSTI, 2, 0), _do(JEQ, TIOCLINUX, 1, 0), allow, notify],
        "prctl": [_low(0), _do(JEQ, PR_SET_SECCOMP, 0, 1), notify, allow],
    }
    if own_pid := rules.signals_within:
        group = -own_pid & 0xFFFFFFFF
        bodies["kill"] = [
            _low(0),
            *(_do(JEQ, pid, skip, 0) for pid, skip in ((own_pid, 3), (0, 2), (group, 1))),
            notify,
            allow,
        ]
        bodies["tgkill"] = [_low(0), _do(JEQ, own_pid, 1, 0), notify, allow]
        bodies["tkill"] = [notify]
    return bodies


def _socket(gpu: bool) -> list[Instruction]:
    """Local ones are refused as a library expects it, others counted; who has a GPU may make those of its driver."""
    notify, allow, refuse = _do(RET, NOTIFY), _do(RET, ALLOW), _do(RET, ERRNO | errno.EACCES)
    if not gpu:
        return [_low(0), _do(JEQ, AF_UNIX, 0, 1), refuse, notify]
    kind = [_low(1), _do(AND, 0xF), _do(JEQ, SOCK_SEQPACKET, 0, 1), allow, refuse]
    return [_low(0), _do(JEQ, AF_UNIX, 0, len(kind)), *kind, notify]


def install(code: bytes) -> int:
    """Put it on this thread, for good; the descriptor of the listener. Raises `OSError`."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    program = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(program))
    header_buffer = ctypes.create_string_buffer(header, len(header))
    flags = SPEC_ALLOW | NEW_LISTENER
    try:
        return kernel.call("seccomp", SET_MODE_FILTER, flags | WAIT_KILLABLE, header_buffer)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.19
            raise
        return kernel.call("seccomp", SET_MODE_FILTER, flags, header_buffer)
