"""Sentences for people about a run's plugins and data: never an error, each said once. The run says where they go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress

log = logging.getLogger("slime")


class Notices:
    """Says each thing once.

    Example:
        NOTICES.to(report.note)
        NOTICES.say(("chdir", "geo"), "geo.slime_reward changed the working folder; it was changed back")
    """

    def __init__(self) -> None:
        self._sink: Callable[[str], None] | None = None
        self._said: set[Hashable] = set()
        self._lock = threading.Lock()

    def to(self, sink: Callable[[str], None] | None) -> None:
        """Where sentences go from now on, and all may be said again; None is the log ``slime``."""
        self._sink = sink
        self._said.clear()

    def say(self, key: Hashable, text: str) -> None:
        """Say ``text``, unless something with this key was said before. From any thread; never raises."""
        with self._lock:
            if key in self._said:
                return
            self._said.add(key)
        if self._sink is None:
            log.warning(text)
            return
        with suppress(Exception):
            self._sink(text)


NOTICES = Notices()
"""Of this process."""
