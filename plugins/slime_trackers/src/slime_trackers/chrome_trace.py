"""A timeline as RUN/trace.json: Chrome's trace event format, which Perfetto, Chrome and TensorBoard's viewers open.

The file is an array with an event a line; a run that was killed leaves it without the bracket at the end, which those
readers allow, and a resumed run goes on behind its last whole line.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping
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
        self._events: list[tuple[str, int, str, float, float, Mapping[str, Any]]] = []
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._lanes: set[int] = set()  # that have a name
        self._error: OSError | None = None

    def open(self, run_dir: Path) -> None:
        """Begin the file, or go on with it."""
        path = run_dir / "trace.json"
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        if not _go_on(file):
            file.seek(0)
            file.truncate()
            names = [(RUN, 0, "process_name", "run"), (RUN, 0, "thread_name", LOOP)]
            names.append((SAMPLES, 0, "process_name", "samples"))
            file.write(("[\n" + ",\n".join(_name(*name) for name in names)).encode())
        file.flush()
        self._thread = threading.Thread(target=self._work, args=(file,), name="slime-trace", daemon=True)
        self._thread.start()

    def write(self, track: str, lane: int, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """One complete event."""
        self._events.append((track, lane, name, start, end, facts))

    def leave(self, track: str) -> None:
        """Nothing: its lane is used again."""

    def flush(self) -> None:
        """Have the thread write what there is.

        Raises:
            OSError: what it wrote before could not be written; it has ended.
        """
        events, self._events = self._events, []
        if self._error is not None:
            raise self._error
        self._queue.put(events)

    def finish(self) -> None:
        """Have the thread end the array."""
        self._queue.put(self._events)
        self._queue.put(None)

    def close(self) -> None:
        """Wait for the end of the array; raises as `flush`."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, file: BinaryIO) -> None:
        """Write events until there are no more; texts are made here, beside what the run computes."""
        try:
            with file:
                while (events := self._queue.get()) is not None:
                    file.write("".join(f",\n{line}" for event in events for line in self._lines(*event)).encode())
                    file.flush()
                file.write(END)
        except OSError as error:
            self._error = error

    def _lines(
        self, track: str, lane: int, name: str, start: float, end: float, facts: Mapping[str, Any]
    ) -> Iterator[str]:
        """The lines of an event; microseconds are cut at both ends, so that spans which nest still do."""
        if lane and lane not in self._lanes:
            self._lanes.add(lane)
            yield _name(SAMPLES, lane, "thread_name", f"lane {lane}")
        at, to = int(start * 1e6), int(end * 1e6)
        values = json.dumps(facts if track == LOOP else {"sample": track, **facts})
        yield (
            f'{{"name":"{name}","ph":"X","pid":{SAMPLES if lane else RUN},"tid":{lane},'
            f'"ts":{at},"dur":{to - at},"args":{values}}}'
        )


def _name(pid: int, tid: int, kind: str, text: str) -> str:
    return f'{{"name":"{kind}","ph":"M","pid":{pid},"tid":{tid},"args":{{"name":"{text}"}}}}'


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _go_on(file: BinaryIO) -> bool:
    """Cut a file behind its last whole event; False where it has none."""
    start = max(0, file.seek(0, 2) - LONGEST)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(b"}")
    while end >= 0 and not _is_event(tail[tail.rfind(b"\n", 0, end) + 1 : end + 1]):
        end = tail.rfind(b"}", 0, end)
    if end >= 0:
        file.seek(start + end + 1)
        file.truncate()
    return end >= 0
