"""What libraries print while a run has the terminal: no progress bars, and warnings go through the report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slime_core.plugins.files import FOLDER_PACKAGE

if TYPE_CHECKING:
    from slime_core.report import Report

WIDTH = 200  # characters of a warning on the terminal; log/run.log has the whole text


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers: only our own line moves."""
    from transformers.utils import logging as library

    library.disable_progress_bar()


class ReportHandler(logging.Handler):
    """Notes the first line of each warning once, and logs its whole text."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._noted: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on."""
        source = record.filename if record.name.startswith(FOLDER_PACKAGE) else record.name.partition(".")[0]
        text = f"{source}: {record.getMessage().strip()}"
        if text in self._noted:
            return
        self._noted.add(text)
        line = text.splitlines()[0]
        short = line if len(line) <= WIDTH else line[:WIDTH] + " ..."
        if short != text:
            self._report.log(text)
        self._report.note(short)


@contextmanager
def warnings_noted(report: Report) -> Iterator[None]:
    """Pass warnings of libraries and of our own loggers to ``report`` inside the block."""
    from transformers.utils import logging as library

    root, handler = logging.getLogger(), ReportHandler(report)
    library.disable_default_handler()
    library.enable_propagation()
    logging.captureWarnings(True)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.captureWarnings(False)
        library.disable_propagation()
        library.enable_default_handler()
