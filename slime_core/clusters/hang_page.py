"""What every process of a run does in; a page that says who waits for whom out, the first cause in its first line."""

from __future__ import annotations

import faulthandler
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core.clusters.looking import STOPPED, Look, collective, place, state_of

HEADS = ("process", "pid", "node", "state", "asked for", "since", "is in")


@dataclass(slots=True, frozen=True, kw_only=True)
class Seen:
    """One process, and what others wait for it to do.

    Example: Seen(name="rank 1", node="node-3", doing="step", seconds=35.0, look=look)
    """

    name: str
    node: str
    doing: str  # empty: nobody waits for it
    seconds: float | None
    look: Look

    @classmethod
    def driver(cls, phase: str, since: float) -> Seen:
        """This process, in a phase of the loop."""
        node, seconds = socket.gethostname(), time.monotonic() - since if phase else None
        return cls(
            name="driver",
            node=node,
            doing=phase,
            seconds=seconds,
            look=Look(pid=os.getpid(), state=state_of(os.getpid())),
        )

    @property
    def within(self) -> str:
        """The collective that it waits in, else the function that it runs, else the kernel's."""
        return collective(self.look.stack) or place(self.look.stack) or self.look.waits_in

    @property
    def who(self) -> str:
        """`rank 1 (pid 123 on node-3)`; the node only where it is another one."""
        elsewhere = "" if self.node == socket.gethostname() else f" on {self.node}"
        return f"{self.name} (pid {self.look.pid}{elsewhere})"

    @property
    def asked(self) -> str:
        """`for 35 s in step`."""
        return f"for {self.seconds:.0f} s in {self.doing}" if self.seconds is not None else "now"


def cause(seen: Sequence[Seen], late: str) -> str:
    """The first line: who keeps the others waiting.

    A process that is stopped, dead or not to be reached comes first; then one that is busy elsewhere while others wait
    in a collective; then ``late``, who was noticed.

    Example: "rank 1 (pid 123) is stopped (state T), for 35 s in step; rank 0 waits for it in all_reduce"
    """
    busy = [one for one in seen if one.doing and one.name != "driver"]
    stuck = next((one for one in seen if one.look.state in STOPPED), None)
    if stuck is not None:
        return f"{stuck.who} is stopped (state {stuck.look.state}), {stuck.asked}{_waiting(busy, stuck)}"
    gone = next((one for one in seen if one.look.state in ("", "Z", "X") and not one.name.startswith("SGLang")), None)
    if gone is not None:
        return f"{gone.who} cannot be asked: {gone.look.told}, {gone.asked}{_waiting(busy, gone)}"
    together = [one for one in busy if collective(one.look.stack)]
    apart = [one for one in busy if not collective(one.look.stack)]
    if together and apart:
        return f"{apart[0].who} is in {apart[0].within}, {apart[0].asked}{_waiting(busy, apart[0])}"
    kinds = {collective(one.look.stack) for one in together}
    if len(kinds) > 1:
        where = ", ".join(f"{one.name} in {one.within}" for one in together)
        return f"trainer ranks wait in different collectives, {together[0].asked}: {where}"
    found = next((one for one in seen if one.name == late), seen[0])
    return f"{found.who} makes no progress, {found.asked}" + (f": it is in {found.within}" if found.within else "")


def _waiting(busy: Sequence[Seen], cause: Seen) -> str:
    """`; rank 0 waits for it in all_reduce`."""
    others = [one for one in busy if one is not cause and collective(one.look.stack)]
    if not others or not cause.name.startswith(("rank", "host")):
        return ""
    names = f"{', '.join(one.name for one in others)} {'waits' if len(others) == 1 else 'wait'}"
    return f"; {names} for it in {collective(others[0].look.stack)}"


def render(first: str, facts: Mapping[str, str], seen: Sequence[Seen], driver: str) -> str:
    """The page."""
    rows = [HEADS, *(_row(one) for one in seen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [f"HANG  {first}", *(f"{name:8}{text}" for name, text in facts.items()), "", *table]
    for one in seen:
        stack = driver if one.name == "driver" else one.look.stack or one.look.why
        lines += ["", f"-- {one.who}", stack]
    return "\n".join(lines) + "\n"


def _row(one: Seen) -> tuple[str, ...]:
    seconds = f"{one.seconds:.0f} s" if one.seconds is not None else ""
    state = one.look.told if one.look.state else "?"
    return (one.name, str(one.look.pid), one.node, state, one.doing or "nothing", seconds, one.within or one.look.why)


def own_stack() -> str:
    """Where the threads of this process are."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").strip()
