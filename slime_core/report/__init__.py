"""Figures of a run: one run directory, one JSONL of metrics, trackers, a live line, and the best and worst samples.

Reporting may fail without stopping training; nothing else may.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.report.report import Report as Report
    from slime_core.report.rundir import RunDir as RunDir

__all__ = ["Report", "RunDir"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slime_core.report' has no attribute '{name}'")
    return getattr(import_module(f"slime_core.report.{name.lower()}"), name)
