"""What travels through the sandbox's door: how much isolation, how much of everything, and how a candidate ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["strong", "medium", "none"]
Status = Literal[
    "ok",  # it ended by itself, with exit code 0 and, where it was asked for one, an answer
    "died",  # it ended otherwise: an exception, a signal, no answer
    "timeout",  # it was ended at a deadline, or used up its processor time
    "memory",  # it asked for more than its limit
    "too_much_output",  # what it printed, or its answer, was longer than its limit
    "infra",  # the sandbox failed, not the candidate: to be tried again, never scored
]
LIMIT_WORDS = ("timeout", "memory", "too_much_output")


@dataclass(slots=True, frozen=True, kw_only=True)
class Policy:
    """What all candidates of one sandbox share.

    Example:
        Policy(level="strong", environment={"TRITON_INTERPRET": "1"})
    """

    level: Literal["auto", "strong", "medium", "none"] = "auto"  # auto: strong, or medium where that is out of reach
    i_trust_this_code: bool = False  # what level "none" asks for
    gpu: bool = False  # the machine's GPUs can be reached by those candidates that are given one
    threads: int = 1  # of torch, in one candidate
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the few variables that every candidate has
    readable: tuple[str, ...] = ()  # files and folders that candidates may read, beside Python and its libraries
    restarts: int = 3  # of a fork server that died, before the sandbox gives up


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """How much one candidate, with all processes it starts, may use. Bytes and seconds."""

    wall_seconds: float = 60.0  # from where its code begins; then it is killed
    cpu_seconds: int = 120  # processor time of one process
    memory_bytes: int = 2 << 30  # of all its processes, beyond what the fork server had
    disk_bytes: int = 256 << 20  # of its private folder, the only place it can write to
    files: int = 4096  # in that folder
    open_files: int = 256  # a process
    processes: int = 64  # threads count
    output_bytes: int = 1 << 20  # stdout and stderr together
    result_bytes: int = 64 << 20  # of one message from it


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """How a candidate ended. Everything in ``result`` and ``stdout`` is the candidate's own claim.

    Example:
        Outcome(status="died", reason="was killed by SIGSEGV", signal=11, seconds=0.02, level="strong")
    """

    status: Status
    reason: str = ""  # the same in words, for a person
    result: bytes = b""  # the last message, as `Sandbox.run` got it
    stdout: str = ""  # with stderr, capped, undecodable bytes replaced
    exit_code: int | None = None
    signal: int = 0
    seconds: float = 0.0  # wall time, by the clock of this side
    violations: Mapping[str, int] = field(default_factory=dict)  # what it tried and was denied -> how often
    level: str = ""  # the level reached
    layers: tuple[str, ...] = ()  # what that level is made of here
