"""Figures of a run for Weights & Biases (`report.use_wandb`); wandb is imported here alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.types import StepReport


class WandbSink:
    """Weights & Biases. Offline unless a key is at hand or ``WANDB_MODE`` is set."""

    def __init__(self, project: str, group: str = "") -> None:
        self._project, self._group = project, group
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Open a W&B run that is named after the run directory."""
        import wandb

        has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        self._run = wandb.init(
            project=self._project,
            group=self._group or None,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            mode=None if "WANDB_MODE" in os.environ or has_key else "offline",
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True),  # no argv: it may hold secrets
        )

    def write(self, report: StepReport) -> None:
        """Metrics and times at step ``version``."""
        self._run.log({**dict(report.items()), "stage_step": report.step}, step=report.version)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
