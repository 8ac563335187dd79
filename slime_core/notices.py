"""Sentences for people about a run's plugins and data: never an error, each said once in a run.

They are warnings of the logger ``slime``; a run passes them to its notes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger("slime")


def notice(key: Hashable, text: str) -> None:
    """Say ``text``, unless something with this key was said before in this run. From any thread; never raises.

    Example:
        notice(("chdir", "geo"), "geo.slime_reward changed the working folder; it was changed back")
    """
    log.warning("%s", text, extra={"once": key})


@contextmanager
def notices_to(note: Callable[[str], None]) -> Iterator[None]:
    """Pass notices to ``note`` inside the block, each key once; outside they go where warnings go."""
    handler = _Once(note)
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


class _Once(logging.Handler):
    """Calls ``note`` with the first record of each key."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note
        self._keys: set[Hashable] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on."""
        key = getattr(record, "once", record.getMessage())
        if key not in self._keys:
            self._keys.add(key)
            with suppress(Exception):
                self._note(record.getMessage())
