"""Figures of a run: one run directory, one JSONL of metrics, trackers, a live line, and the best and worst samples.

Reporting may fail without stopping training; nothing else may.
"""

from slime_core.report.report import Report as Report
from slime_core.report.rundir import RunDir as RunDir

__all__ = ["Report", "RunDir"]
