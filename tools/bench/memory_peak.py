"""What lies in a GPU's memory when it is fullest: bytes by the line of ours that asked for them.

    with memory_peak.recorded() as lines:
        step()
    print(*lines, sep="\\n")

Allocations are replayed from torch's own history; what was there before is "earlier". An allocation counts under the
innermost frame of this repository, beside that of torch that asked for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


@contextmanager
def recorded(least: float = 0.05) -> Iterator[list[str]]:
    """A list that is filled at the end: lines of GiB and where, largest first, of at least ``least`` GiB each."""
    import torch

    lines: list[str] = []
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=2_000_000)
    try:
        yield lines
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = next((trace for trace in traces if trace), [])
    lines += table(events, before, least)


def table(events: Sequence[dict[str, Any]], before: int, least: float) -> list[str]:
    """The same of a trace: events with ``action`` (alloc, free_completed), ``addr``, ``size`` and ``frames``."""
    changes = [_change(event) for event in events]
    fullest = max(range(len(events)), key=list(accumulate(changes)).__getitem__, default=-1)
    live: dict[int, dict[str, Any]] = {}
    earlier = before
    for event in events[: fullest + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed" and live.pop(event["addr"], None) is None:
            earlier -= event["size"]
    places: dict[str, int] = defaultdict(int)
    for event in live.values():
        places[_place(event["frames"])] += event["size"]
    peak = earlier + sum(event["size"] for event in live.values())
    rows = [f"{peak / GIB:.2f} GiB at the peak, {earlier / GIB:.2f} from earlier"]
    largest = sorted(places.items(), key=lambda pair: -pair[1])
    return rows + [f"  {size / GIB:.2f}  {place}" for place, size in largest if size >= least * GIB]


def _change(event: dict[str, Any]) -> int:
    """Bytes more that are taken."""
    return {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * int(event["size"])


def _place(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost frame of ours, or the innermost of all."""
    named = [(Path(frame["filename"]), frame) for frame in frames]
    ours = next((pair for pair in named if ROOT in pair[0].parents), named[0] if named else None)
    return f"{ours[0].name}:{ours[1]['line']} {ours[1]['name']}" if ours else "unknown"
