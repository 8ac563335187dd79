"""The program of a run's watchdog (`watched`): it names what keeps a driver from running, and ends the driver.

    python -I -S watchdog.py ORDER

no beat for a hook's own limit and `GRACE` seconds   the hook that holds the interpreter is named, and the run ended
no beat for `hang_timeout`                           the same, where no hook does
no turn of the event loop for `LAG` seconds          the hook that holds the loop is named, with its line
no turn for that hook's own limit and `GRACE`        the run is ended
a signal unheard for `DEAF` seconds                  names what holds the interpreter; a second one ends the run

Time in which the driver or this process is stopped (SIGSTOP) does not count. The driver is killed: nothing else ends a
process that is inside of C, and all that must last is on disk.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.errors import SlimeError
    from slime_core.heartbeat import HeartbeatMemory, HookCall

PR_SET_PDEATHSIG = 1
TICK = 0.5  # seconds
QUIET = 2.0  # seconds without a heartbeat until the cause is sought
GRACE = 2.0  # seconds after a limit, for the driver to keep it itself
LAG = 5.0  # seconds without a turn of the event loop after which the hook that holds it is named
DEAF = 2.0
BUSY = 0.05  # of a core: less is what threads use that wait for the interpreter
ANSWER = 2.0  # seconds in which a thread must have written its stack
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)


class Watchdog:
    """See the module."""

    def __init__(self, order: dict[str, Any], memory: HeartbeatMemory) -> None:
        self.pid, self.memory, self.run_dir = int(order["pid"]), memory, Path(order["run_dir"])
        self.signals, self.stacks, self.number = order["signals"], order["stacks"], order["signal"]
        self.hang_timeout = float(order["hang_timeout"]) or math.inf
        self.beats, self.silent = 0, 0.0
        self.loop_beats, self.loop_silent, self.look, self.named = 0, 0.0, QUIET, set[str]()
        self.last, self.count, self.unheard, self.notified = 0, 0, 0.0, False

    def run(self) -> None:
        """Look until the driver ends, or is ended."""
        while True:
            before = time.monotonic()
            if not self._hear() or os.getppid() != self.pid:
                return
            passed = min(time.monotonic() - before, 2 * TICK)
            if _stat(f"/proc/{self.pid}/stat")[0] in "Tt":
                continue
            beats, loop_beats = self.memory.beats, self.memory.loop_beats
            answered = self.memory.signals >= self.count
            self.silent = 0.0 if beats != self.beats else self.silent + passed
            self.loop_silent = 0.0 if loop_beats != self.loop_beats else self.loop_silent + passed
            self.look = self.look if self.loop_silent else QUIET
            self.unheard = 0.0 if answered else self.unheard + passed
            self.beats, self.loop_beats, self.notified = beats, loop_beats, self.notified and not answered
            if self._unheard() or self._holds() or (self.silent >= QUIET and self._late()):
                return

    def _hear(self) -> bool:
        """Wait a tick, or for a signal of the driver's; False when the driver has ended."""
        if select.select([self.signals], [], [], TICK)[0]:
            numbers = os.read(self.signals, 512)
            if not numbers:
                return False
            caught = [number for number in numbers if number in HANDLED]
            self.count += len(caught)
            self.last = caught[-1] if caught else self.last
        return True

    def _unheard(self) -> bool:
        """End a driver that does not hear its second signal; say so of the first."""
        if self.unheard >= DEAF and not self.notified and self.count == 1:
            self.notified = True
            place = innermost(self._culprit()[1], None)
            name = signal.Signals(self.last).name
            say(f"\n{name}: not handled yet: Python is blocked at {place}; a second signal ends the run at once")
        if self.unheard < DEAF or self.count < 2:
            return False
        name, status = signal.Signals(self.last).name, "interrupted" if self.last == signal.SIGINT else "terminated"
        call, stack = self._culprit()
        say(f"\n{name} again: ended at once; what was recorded can be resumed")
        self._end(status, self._error(call, stack))
        return True

    def _late(self) -> bool:
        """End a driver whose interpreter has been held for too long."""
        limits = [call.limit + GRACE for calls in self.memory.calls().values() for call in calls]
        if self.silent < min([*limits, self.hang_timeout]):
            return False
        call, stack = self._culprit()
        if self.silent < min(call.limit + GRACE if call is not None else math.inf, self.hang_timeout):
            return False
        if self.memory.beats != self.beats:  # it came back meanwhile
            return False
        self._end("failed", self._error(call, stack, self.silent))
        return True

    def _holds(self) -> bool:
        """Name a hook that holds the event loop while Python runs; end the driver where it does so past its limit."""
        calls = self.memory.calls().get(self.pid, [])
        if not calls or self.silent >= QUIET or self.loop_silent < self.look:
            return False
        self.look = self.loop_silent + QUIET
        stack = self._stack(self.pid)
        call = owner(calls, stack)
        if call is None or self.memory.loop_beats != self.loop_beats:
            return False
        if self.loop_silent >= call.limit + GRACE:
            self._end("failed", self._error(call, stack, self.loop_silent, lock="the event loop"))
            return True
        place = innermost(stack, call.source)
        if self.loop_silent >= LAG and place not in self.named:
            self.named.add(place)
            self._note(
                f"{call.hook} ({call.subject}) has blocked the event loop for {self.loop_silent:.0f} s at {place}: "
                "nothing else can run; await there, or write the hook with def, which runs it in a thread"
            )
        return False

    def _culprit(self) -> tuple[HookCall | None, str]:
        """The hook call that blocks, and the stack of its thread; without one, that of the running thread.

        While Python runs that is the main thread, which alone hears signals.
        """
        calls = self.memory.calls()
        threads = self._running(calls) if self.silent else [self.pid]
        stacks = [self._stack(thread) for thread in threads]
        for thread, stack in zip(threads, stacks, strict=True):
            if call := owner(calls.get(thread, []), stack):
                return call, stack
        return None, stacks[0]

    def _running(self, calls: dict[int, list[HookCall]]) -> list[int]:
        """The threads that run, hooks' first; where none does, hooks' threads by the shortest limit."""
        before = _spent(self.pid)
        time.sleep(TICK)
        used = {thread: ticks - before.get(thread, ticks) for thread, ticks in _spent(self.pid).items()}
        least = max(BUSY * TICK * os.sysconf("SC_CLK_TCK"), max(used.values(), default=0) / 2)
        busy = [thread for thread in used if used[thread] >= least]
        in_hooks = [thread for thread in busy or calls if thread in calls]
        return [*sorted(in_hooks, key=lambda thread: calls[thread][0].limit), *(busy or [self.pid])]

    def _stack(self, thread: int) -> str:
        """What faulthandler writes of a thread, innermost frame first; empty where it cannot."""
        with suppress(OSError, AttributeError):
            if ctypes.CDLL(None, use_errno=True).tgkill(self.pid, thread, self.number) != 0:
                return ""
        text, end = b"", time.monotonic() + ANSWER
        while time.monotonic() < end and select.select([self.stacks], [], [], 0.2 if text else ANSWER)[0]:
            text += os.read(self.stacks, 65536)
        return text.decode(errors="replace").strip()

    def _error(self, call: HookCall | None, stack: str, silent: float | None = None, lock: str = "") -> SlimeError:
        from slime_core.errors import Hung, PluginError

        place = innermost(stack, call.source if call else None)
        since = "no signal was heard" if silent is None else f"nothing else ran for {silent:.0f} s"
        where = f"it holds {lock}" if lock else "it is in C code"
        reason = f"{where}, where Python can end nothing: {since}\n{stack}"
        ledger = (self.run_dir / "ledger.sqlite").exists()  # an evaluation has none
        go_on = f"\nwhat was finished is in the ledger: slime run --resume {self.run_dir}" if ledger else ""
        if call is None:
            return Hung(
                f"the driver's interpreter is blocked at {place}",
                where=str(self.run_dir),
                why=reason,
                fix=f"work that takes longer than that: --hang-timeout SECONDS{go_on}",
            )
        late = "does not return" if silent is None else f"did not answer in {call.limit:g} s"
        return PluginError(
            f"{call.hook} {late} for {call.subject}",
            code="PLG60",
            where=f"{call.provider}, blocked at {place}, {call.subject}",
            why=reason,
            fix="bound what it calls (a regular expression, a loop in C), or give it a process, which can be ended: "
            f"slime_core.hookspecs.own_process\nor raise the limit: {call.key}={2 * call.limit:g}{go_on}",
        )

    def _note(self, text: str) -> None:
        """A line on the terminal and in the run's log."""
        say(text)
        with suppress(OSError), (self.run_dir / "log" / "run.log").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _end(self, status: str, error: SlimeError) -> None:
        """Write the page, note in the run how it ended, and kill the driver."""
        from slime_cli.starts import end, starts_of
        from slime_core.report.rundir import RunDir

        error.exit_code = 128 + signal.SIGKILL
        say(error.render())
        run_dir = RunDir(self.run_dir)
        run_dir.save_hang(f"{error.render()}\n")
        with suppress(OSError):
            starts = starts_of(run_dir)
            run_dir.epoch = starts[-1]["epoch"] if starts else run_dir.epoch
            end(run_dir, status, {"error": error.code, "exit_code": error.exit_code})
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def owner(calls: list[HookCall], stack: str) -> HookCall | None:
    """The hook call whose code is on the stack; of several of one hook, which await their turn, any may be it."""
    matching = [call for call in calls if call.source and f'  File "{call.source}' in stack]
    same = [call for call in matching if call.hook == matching[0].hook]
    return replace(same[0], subject=f"one of {len(same)} calls") if len(same) > 1 else next(iter(same), None)


def innermost(stack: str, source: str | None) -> str:
    """``function (file:line)`` of the innermost frame below ``source``, else of the innermost that is not Python's."""
    frames = [(m["file"], f"{m['name']} ({m['file']}:{m['line']})") for m in FRAME.finditer(stack)]
    inside = [shown for file, shown in frames if source and file.startswith(source)]
    library = str(Path(os.__file__).parent)
    outside = [shown for file, shown in frames if not file.startswith(library) or "site-packages" in file]
    return (inside or outside or [shown for _, shown in frames] or ["an unknown place"])[0]


def say(text: str) -> None:
    """Lines on stderr, which is the run's."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _spent(pid: int) -> dict[int, int]:
    """Thread id -> processor time in clock ticks."""
    spent = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        fields = _stat(f"{entry}/stat")
        if len(fields) > 12:
            spent[int(entry.name)] = int(fields[11]) + int(fields[12])
    return spent


def _stat(path: str) -> list[str]:
    """Fields of a ``stat`` file from the state on; a dead process's state without the file."""
    try:
        return Path(path).read_text(errors="replace").rpartition(")")[2].split() or ["X"]
    except OSError:
        return ["X"]


def main() -> None:
    """Watch the driver of the order."""
    order = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # where it is stopped, with the driver
    sys.path[:0] = order["path"]
    from slime_core.heartbeat import HeartbeatMemory

    Watchdog(order, HeartbeatMemory(order["memory"])).run()


if __name__ == "__main__":
    main()
