"""A timeline as RUN/trace.json: Chrome's trace event format, which Perfetto, Chrome and TensorBoard's viewers open.

The file is an array with an event a line; a run that was killed leaves it without the bracket at the end, which those
readers allow, and a resumed run goes on behind its last whole line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slime_trackers.timeline import LOOP

RUN, SAMPLES = 1, 2
"""What the format calls processes."""
END = b"\n]\n"
LONGEST = 1 << 16
"""Bytes of an event, at most."""


class ChromeTrace:
    """A `timeline.SpanWriter`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: BinaryIO | None = None
        self._lanes: set[int] = set()

    def open(self, run_dir: Path) -> None:
        """Begin the file, or go on with it."""
        path = run_dir / "trace.json"
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self._file.seek(0, 2)
        if not self._go_on():
            self._file.seek(0)
            self._file.truncate()
            self._file.write(b"[\n" + self._name(RUN, 0, "process_name", "run").encode())
            for text in (self._name(RUN, 0, "thread_name", LOOP), self._name(SAMPLES, 0, "process_name", "samples")):
                self._file.write(b",\n" + text.encode())
        self._file.flush()

    def _go_on(self) -> bool:
        """Cut the file behind its last whole event."""
        assert self._file is not None
        start = max(0, self._file.tell() - LONGEST)
        self._file.seek(start)
        tail = self._file.read()
        end = tail.rfind(b"}")
        while end >= 0 and not _is_event(tail[tail.rfind(b"\n", 0, end) + 1 : end + 1]):
            end = tail.rfind(b"}", 0, end)
        if end >= 0:
            self._file.seek(start + end + 1)
            self._file.truncate()
        return end >= 0

    def write(self, track: str, lane: int, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """One complete event; microseconds are rounded at both ends, so that spans which nest still do."""
        if lane and lane not in self._lanes:
            self._lanes.add(lane)
            self._lines.append(self._name(SAMPLES, lane, "thread_name", f"lane {lane}"))
        at = round(start * 1e6)
        values = dict(facts) if track == LOOP else {"sample": track, **facts}
        self._lines.append(
            f'{{"name":{json.dumps(name)},"ph":"X","pid":{SAMPLES if lane else RUN},"tid":{lane},'
            f'"ts":{at},"dur":{round(end * 1e6) - at},"args":{json.dumps(values)}}}'
        )

    def _name(self, pid: int, tid: int, kind: str, text: str) -> str:
        return f'{{"name":"{kind}","ph":"M","pid":{pid},"tid":{tid},"args":{{"name":"{text}"}}}}'

    def leave(self, track: str) -> None:
        """Nothing: its lane is used again."""

    def flush(self) -> None:
        """Write what there is."""
        if self._lines and self._file is not None:
            self._file.write("".join(f",\n{line}" for line in self._lines).encode())
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        """End the array."""
        self.flush()
        if self._file is not None:
            self._file.write(END)
            self._file.close()
            self._file = None


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
