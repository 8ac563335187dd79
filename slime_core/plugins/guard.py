"""What is the process's and no hook may leave changed: working folder, signal handlers, locale, limits, its end.

Each is looked at when the first call of plugin code begins, compared when one ends, put back and told. Generators of
random numbers are compared too while ``report.check_hooks`` is on, and told: the core draws nothing from them, so
they are not put back. A hook that forks must end its child; one that comes back into our code ends there.
"""

from __future__ import annotations

import locale
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slime_core.errors import END_NOW
from slime_core.notices import notice
from slime_core.plugins.calls import WATCH, Call

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT")
    if hasattr(signal, name)
)
LIMITS = {name: getattr(resource, name) for name in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE")}
_handler: Callable[[Any], Any] = getattr(getattr(signal, "_signal", signal), "getsignal")  # noqa: B009
"""`signal.getsignal` without the member of an enum that it makes of its answer, which takes ten times longer."""
DRAWS = (
    "a run that is resumed draws other numbers; derive yours: "
    "random.Random(slime_core.seeds.seed_of(ctx.config.seed, sample.id))"
)


@dataclass(slots=True, frozen=True)
class State:
    """Of the process, at one moment."""

    cwd: str
    locale: str
    handlers: tuple[Any, ...]
    limits: tuple[tuple[int, int], ...]  # soft and hard

    @classmethod
    def now(cls) -> State:
        """Look."""
        try:
            cwd = os.getcwd()
        except OSError:  # the folder is gone
            cwd = ""
        handlers, limits = tuple(map(_handler, SIGNALS)), tuple(map(resource.getrlimit, LIMITS.values()))
        return cls(cwd, locale.setlocale(locale.LC_ALL), handlers, limits)


class Guard:
    """Begins with the first call in progress and lasts until none is."""

    def __init__(self) -> None:
        self.may_end = False  # whether a hook may end this process, which is there for it alone
        self._before: State | None = None
        self._draws: dict[str, Any] = {}
        self._open = 0
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forget)

    def enter(self, call: Call, *, draws: bool = False) -> None:
        """A call begins; ``draws`` asks to compare random generators too."""
        with self._lock:
            if not self._open:
                self._before, self._draws = State.now(), {}
                os._exit = END_NOW if self.may_end else _refuse_to_end  # type: ignore[assignment]
            if draws and not self._draws:
                self._draws = _generators()
            self._open += 1
        WATCH.enter(call)

    def leave(self, call: Call) -> None:
        """It ends: put back what it, or one beside it, has changed."""
        WATCH.leave(call)
        with self._lock:
            self._open -= 1
            self._compare(call)
            if not self._open:
                os._exit = END_NOW

    def _forget(self) -> None:
        self._lock, self._open, self._draws = threading.RLock(), 0, {}
        os._exit = END_NOW

    def _compare(self, call: Call) -> None:
        before, now = self._before, State.now()
        if before is not None and now != before:
            _put_back(before, now, [call, *WATCH.in_progress()])
        if not self._draws:
            return
        drawn = _generators()
        for name in [n for n, state in drawn.items() if self._draws.get(n, state) != state]:
            _say(f"drew from {name}, or seeded it", [call, *WATCH.in_progress()], DRAWS)
        self._draws = drawn


def _put_back(before: State, now: State, calls: Sequence[Call]) -> None:
    if now.cwd != before.cwd and before.cwd:
        with suppress(OSError):
            os.chdir(before.cwd)
        _say(f"changed the working folder to {now.cwd}", calls, "it was put back; use absolute paths")
    if now.locale != before.locale:
        locale.setlocale(locale.LC_ALL, before.locale)
        _say(f"changed the locale to {now.locale}", calls, "it was put back")
    _put_limits_back(before, now, calls)
    changed = [n for n, (a, b) in enumerate(zip(before.handlers, now.handlers, strict=True)) if a is not b and a != b]
    with suppress(ValueError):  # not the main thread, which a handler cannot be set from either
        for number in changed:
            if before.handlers[number] is not None:  # not one of Python
                signal.signal(SIGNALS[number], before.handlers[number])
            _say(f"changed the handler of {SIGNALS[number].name}", calls, "it was put back; signals are the run's")


def _put_limits_back(before: State, now: State, calls: Sequence[Call]) -> None:
    for name, old, new in zip(LIMITS, before.limits, now.limits, strict=True):
        if new == old:
            continue
        done = "it was put back"
        try:
            resource.setrlimit(LIMITS[name], old)
        except (OSError, ValueError):  # the hard limit was lowered too
            with suppress(OSError, ValueError):
                resource.setrlimit(LIMITS[name], (new[1], new[1]))
            done = "it cannot be put back whole; set limits in a process of your own"
        _say(f"changed {name} from {old[0]} to {new[0]}", calls, done)


def _say(what: str, calls: Sequence[Call], fix: str) -> None:
    names = list(dict.fromkeys(f"{call.answer.provider.name}.{call.answer.hook}" for call in calls))
    who = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    notice((who, what), f"{who} {what} ({calls[0].about}); {fix}")


def _generators() -> dict[str, Any]:
    """States of the global generators that are loaded, ready to compare."""
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        found["numpy.random"] = (state["state"]["key"].tobytes(), state["state"]["pos"])
    if torch is not None and hasattr(torch, "get_rng_state"):
        found["torch's generator"] = torch.get_rng_state().numpy().tobytes()
    return found


def _refuse_to_end(status: int) -> None:
    """In place of `os._exit` while plugin code runs: a run that is not done may not end as if it were."""
    raise SystemExit(f"os._exit({status})")


def end_if_forked(process: int) -> None:
    """End this process where it is not ``process``: a hook has forked, and its child came back into our code."""
    if os.getpid() != process:
        os.write(2, b"a hook forked and its child returned; it ends here (use subprocess, or os._exit in the child)\n")
        END_NOW(70)


GUARD = Guard()
"""Of this process."""
