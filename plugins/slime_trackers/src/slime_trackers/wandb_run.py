"""A run in Weights & Biases, offline where no key is at hand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.types import StepReport
from slime_trackers.feed import Arrays, TrackedRun, Tracker

COLUMNS = ("rank", "id", "task", "reward", "status", "response_length", "prompt", "response", "label")


class WandbRun(Tracker):
    """A run of W&B that is named after the run directory; a resumed run continues it.

    W&B keeps the first figures of a step and drops those that come again.
    """

    name = "wandb"
    sends_at_close = True  # its own process writes in the background and dies with this one

    def open(self, run: TrackedRun) -> str:
        """Start or continue it; no argv reaches W&B, since it may hold secrets."""
        import wandb

        options = run.options
        has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        mode = options.wandb_mode or os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        host = {"base_url": options.wandb_host} if options.wandb_host else {}
        wandb.setup(wandb.Settings(silent=True))  # else it recommends a product where it sees `mcp` or `verifiers`
        self._run: Any = wandb.init(
            project=options.wandb_project,
            group=options.wandb_group or None,
            entity=options.wandb_team or None,
            id=run.id or options.wandb_run_id or None,
            resume="allow",
            name=run.run_dir.name,
            notes=options.tracker_notes or None,
            tags=options.tracker_tags or None,
            dir=str(options.wandb_dir or run.run_dir),
            config=dict(run.config),
            mode=mode,  # type: ignore[arg-type]
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, **host),
        )
        return str(self._run.id)

    def log(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """Figures at step ``version``."""
        self._run.log({**figures, "stage_step": report.step}, step=report.version)

    def histograms(self, step: int, arrays: Arrays) -> None:
        """Histograms of W&B's own bins."""
        import wandb

        self._run.log({name: wandb.Histogram(values) for name, values in arrays.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table ``samples``."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[[row.get(name) for name in COLUMNS] for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
