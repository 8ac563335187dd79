"""`slime.observability.logging_utils`: figures that functions log, in the run's ``log/functions.jsonl``.

The report of a step is the run's own, with sinks of its own (`slime_trackers`), and cannot be changed by a function.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
FILE = "functions.jsonl"


def configure_logger(prefix: str = "") -> None:
    """Nothing: the run's logging is configured."""


def init_tracking(args: Any, primary: bool = True, **kwargs: Any) -> None:
    """Nothing: sinks start with the run."""


def finish_tracking(args: Any) -> None:
    """Nothing: sinks end with the run."""


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Append a line of figures to the run's ``log/functions.jsonl``; ``step_key`` names the one that is the step."""
    row = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    logger.info("%s %s: %s", step_key, row.get(step_key), row)
    if args.save:
        path = Path(args.save) / "log" / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")


__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]
